"""Home of the native operators, installed as `lohan_ds.ops`; there are none yet. Knows nothing of lohan_ds."""

from pathlib import Path

from lohan_ds.config import config_table

README = (Path(__file__).parents[2] / "README.md").read_text()


def test_the_table_of_keys_is_the_models_own():
    table = README.split("config_table() -->")[1].split("<!-- end of keys -->")[0]
    assert table.strip() == config_table().strip()

"""The native operators, installed as `lohan_ds.ops`; each with a twin in plain torch. Knows nothing of lohan_ds.

builders.py builds an operator (C++ in csrc/<operator>/) the way DeepSpeed builds its own, loader.py decides once per
process whether it is used, cpu_adam.py, grad_accumulate.py and grad_pack.py are what others call.
"""

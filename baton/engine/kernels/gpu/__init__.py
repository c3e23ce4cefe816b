"""The Triton kernels: tensors in, tensors out, a plain torch twin each (docs/kernels.md).

Importing a module of this package imports triton; `support.py` alone does not.
"""

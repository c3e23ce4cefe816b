"""The Triton kernels: tensors in, tensors out, each with a plain torch twin (docs/kernels.md).

Importing a module of this package imports triton, except `support.py`.
"""

"""`python -m bench.gpu` where there is no GPU."""

from __future__ import annotations

import pytest
import torch

from bench import gpu


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_without_a_gpu_it_says_so_and_measures_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu.main([]) == gpu.NO_GPU
    told = capsys.readouterr()
    assert "no GPU" in told.err
    assert not told.out

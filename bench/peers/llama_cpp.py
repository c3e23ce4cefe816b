"""llama.cpp as a peer: `--peer "PYTHON -m bench.peers.llama_cpp"`, or `--convert MODEL FILE` for a
GGUF file that its server and bench.engine_gguf take.

PYTHON has `llama-cpp-python` (built here, so for this processor) and `gguf`; Baton need not be
installed there. Weights: bfloat16, q8_0 for int8 and w8a8 (its products take 8-bit activations),
q4_0 for int4 and w4a8, or a type by llama.cpp's name; KV and everything else as it does by default.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from bench.peers.gguf_file import np, write_gguf
from bench.peers.protocol import Generate, Generated, Setup, Unsupported, serve

llama: Any = importlib.import_module("llama_cpp.llama_cpp")  # its C interface

FILE_TYPES: Final = {
    "int8": llama.LLAMA_FTYPE_MOSTLY_Q8_0,
    "int4": llama.LLAMA_FTYPE_MOSTLY_Q4_0,
    **{
        name: getattr(llama, f"LLAMA_FTYPE_MOSTLY_{name}")
        for name in ("Q4_0", "Q4_K_M", "Q5_K_M", "Q6_K", "Q8_0")
    },
}
STEP: Final = 16_384  # tokens that one call takes
# It tells hundreds of lines for each context. Kept here: C holds no reference to it.
SILENCE: Final = llama.llama_log_callback(lambda level, text, data: None)
ROOM: Final = 256  # a sequence has room for a multiple of so many tokens


def convert(model: Path, quantization: str, path: Path) -> None:
    """Write the checkpoint `model` to the GGUF file `path`. Raises Unsupported."""
    if quantization == "none":
        write_gguf(model, path)
        return
    if quantization not in FILE_TYPES:
        raise Unsupported(f"no {quantization} weights")
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        exact = Path(folder) / "exact.gguf"
        write_gguf(model, exact)
        params = llama.llama_model_quantize_default_params()
        params.ftype = FILE_TYPES[quantization]
        failed = llama.llama_model_quantize(
            str(exact).encode(), str(path).encode(), ctypes.byref(params)
        )
    if failed:
        raise RuntimeError(f"llama_model_quantize returned {failed}")


class LlamaCppModel:
    """A loaded file, and a context that fits the last call's number and length of sequences."""

    def __init__(self, path: Path, threads: int) -> None:
        llama.llama_log_set(SILENCE, None)
        llama.llama_backend_init()
        self._model = llama.llama_model_load_from_file(
            str(path).encode(), llama.llama_model_default_params()
        )
        self._threads = threads
        self._shape = (0, 0)
        self._context: Any = None
        self._words: int = llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(self._model))
        self._batch = llama.llama_batch_init(STEP, 0, 1)

    def generate(self, prompts: Sequence[list[int]], new: int) -> Generated:
        """Generate `new` greedy tokens of each prompt and return them.

        Prompts are computed one by one, then all decode in step.
        """
        began = time.perf_counter()
        self._prepare(len(prompts), max(map(len, prompts)) + new)
        found = [self._run([(i, 0, prompt)]) for i, prompt in enumerate(prompts)]
        first_seconds = time.perf_counter() - began if len(prompts) == 1 else None
        for step in range(1, new):
            rows = [
                (i, len(prompt) + step - 1, tokens[-1:])
                for i, (prompt, tokens) in enumerate(zip(prompts, found, strict=True))
            ]
            for tokens, token in zip(found, self._run(rows), strict=True):
                tokens.append(token)
        return Generated(found, first_seconds)

    def _prepare(self, sequences: int, tokens: int) -> None:
        """Make an empty context for `sequences` sequences of `tokens` tokens each."""
        shape = (sequences, -(-tokens // ROOM) * ROOM)
        if self._shape == shape:
            llama.llama_memory_clear(llama.llama_get_memory(self._context), True)
            return
        if self._context is not None:
            llama.llama_free(self._context)
        params = llama.llama_context_default_params()
        params.n_seq_max, params.n_ctx = sequences, sequences * shape[1]
        params.n_batch = STEP
        params.n_threads = params.n_threads_batch = self._threads
        self._context = llama.llama_init_from_model(self._model, params)
        self._shape = shape

    def _run(self, rows: Sequence[tuple[int, int, Sequence[int]]]) -> list[int]:
        """Return the greedy next token of each row; a row is sequence, first position, tokens."""
        batch, count, ends = self._batch, 0, list[int]()
        for sequence, first, tokens in rows:
            for offset, token in enumerate(tokens):
                batch.token[count] = token
                batch.pos[count] = first + offset
                batch.n_seq_id[count] = 1
                batch.seq_id[count][0] = sequence
                batch.logits[count] = offset == len(tokens) - 1
                count += 1
            ends.append(count - 1)
        batch.n_tokens = count
        failed = llama.llama_decode(self._context, batch)
        if failed:
            raise RuntimeError(f"llama_decode returned {failed}")
        return [int(self._logits(end).argmax()) for end in ends]

    def _logits(self, index: int) -> Any:
        return np.ctypeslib.as_array(
            llama.llama_get_logits_ith(self._context, index), (self._words,)
        )


def load(setup: Setup) -> Generate:
    """Load a GGUF file, or a checkpoint converted to one unless that was done before."""
    path = setup.model if setup.model.is_file() else setup.converted(".gguf", convert)
    return LlamaCppModel(path, setup.threads).generate


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command: convert a checkpoint, or serve as a peer."""
    parser = argparse.ArgumentParser(prog="python -m bench.peers.llama_cpp")
    parser.add_argument("--convert", nargs=2, type=Path, metavar=("MODEL", "FILE"))
    parser.add_argument("--quantization", default="none", choices=("none", *FILE_TYPES))
    given = parser.parse_args(arguments)
    if given.convert:
        convert(given.convert[0], given.quantization, given.convert[1])
    else:
        version = importlib.import_module("llama_cpp").__version__
        serve(f"llama.cpp ({version})", load)
    return 0


if __name__ == "__main__":
    sys.exit(main())

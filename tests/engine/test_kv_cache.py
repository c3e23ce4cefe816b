"""KVArena: one layout for views and bytes;
pool sizes from configuration and memory; the configuration."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from baton.engine.config import EngineConfig, parse_bytes
from baton.engine.memory.kv_cache import KVArena, bytes_per_block
from baton.protocol.errors import ConfigError, InternalError
from baton.protocol.kv_spec import LayerSpec
from baton.runtime.config import load

EVEN = LayerSpec(kv_heads=2, k_dim=3, v_dim=3)
UNEVEN = LayerSpec(kv_heads=2, k_dim=3, v_dim=5)
MLA = LayerSpec(kv_heads=1, k_dim=7, v_dim=0, kind="mla")
CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_views_have_the_stated_shapes_and_share_one_allocation(dtype: str) -> None:
    arena = KVArena((EVEN, UNEVEN, MLA), num_blocks=5, block_size=4, dtype=dtype)
    storages = set()
    for layer, spec in enumerate(arena.layers):
        k, v = arena.layer(layer)
        assert k.shape == (5, 4, spec.kv_heads, spec.k_dim)
        assert v.shape == (5, 4, spec.kv_heads, spec.v_dim)
        assert k.dtype is v.dtype is getattr(torch, dtype)
        assert not k.any()
        storages.add(k.untyped_storage().data_ptr())
        assert k.data_ptr() % 64 == 0
    assert len(storages) == 1
    assert arena.num_bytes >= 5 * bytes_per_block(arena.layers, 4, dtype)


def test_the_layout_is_the_wires() -> None:
    """Block after block, in it layer after layer: [2, block, heads, dim], byte for byte."""
    arena = KVArena((EVEN, EVEN), num_blocks=3, block_size=4, dtype="float32")
    k, v = arena.layer(1)
    numbers = torch.arange(3 * 2 * 4 * 2 * 3, dtype=torch.float32).view(3, 2, 4, 2, 3)
    k.copy_(numbers[:, 0])
    v.copy_(numbers[:, 1])
    buffer, size, start = arena.buffer(), arena.page_bytes, arena.slot_offset(1)
    assert (buffer.format, buffer.readonly, len(buffer)) == ("B", False, 3 * size)
    for block in range(3):
        page = buffer[block * size : (block + 1) * size]
        assert not any(page[:start])
        assert bytes(page[start:]) == numbers[block].numpy().tobytes()
    assert arena.block_bytes(1) == 2 * 4 * 2 * 3 * 4


def test_bytes_written_into_the_buffer_appear_in_the_views() -> None:
    arena = KVArena((UNEVEN, MLA), num_blocks=2, block_size=2, dtype="bfloat16")
    latent, empty = arena.layer(1)
    value = torch.arange(14, dtype=torch.bfloat16).view(2, 1, 7)
    start = arena.page_bytes + arena.slot_offset(1)
    arena.buffer()[start : start + arena.block_bytes(1)] = value.view(torch.uint8).numpy().tobytes()
    assert torch.equal(latent[1], value)
    assert not latent[0].any()
    assert empty.numel() == 0


def test_copy_block_copies_every_layer() -> None:
    arena = KVArena((EVEN, UNEVEN), num_blocks=3, block_size=2, dtype="float32")
    for layer in range(2):
        k, v = arena.layer(layer)
        k[0], v[0] = 1.5, 2.5
    arena.copy_block(0, 2)
    for layer in range(2):
        k, v = arena.layer(layer)
        assert (k[2] == 1.5).all()
        assert (v[2] == 2.5).all()
        assert not k[1].any()


@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
def test_a_pool_lies_where_it_is_told(dtype: str) -> None:
    """Layers and scales, in one piece of somebody else's memory."""
    given: list[torch.Tensor] = []

    def memory(num_bytes: int, page_bytes: int) -> torch.Tensor:
        assert num_bytes >= 4 * page_bytes
        given.append(torch.zeros(num_bytes, dtype=torch.uint8))
        return given[0]

    layers = (LayerSpec(2, 8, 8), LayerSpec(1, 24, 0, kind="mla"))
    arena = KVArena(layers, 4, 4, dtype, memory=memory)
    (place,) = given
    assert place.nbytes == arena.num_bytes
    tensors = [tensor for layer in range(2) for tensor in arena.layer(layer) if tensor.numel()]
    if dtype == "int8":
        tensors += [tensor for layer in range(2) for tensor in arena.scales(layer)]
    for number, tensor in enumerate(tensors, 1):
        tensor.fill_(number)
        inside = tensor.data_ptr() - place.data_ptr()
        assert 0 <= inside < place.nbytes
    assert [float(tensor.flatten()[0]) for tensor in tensors[:3]] == [1.0, 2.0, 3.0]


def test_what_an_arena_cannot_be() -> None:
    with pytest.raises(ConfigError, match="int7"):
        KVArena((EVEN,), 2, 2, "int7")
    arena = KVArena((EVEN,), 2, 2, "float32", device="meta")
    with pytest.raises(InternalError, match="host memory"):
        arena.buffer()


# ---- copies in host memory ----


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
def test_blocks_come_back_from_host_memory_bit_for_bit(dtype: str) -> None:
    arena = KVArena((EVEN, UNEVEN), num_blocks=5, block_size=2, dtype=dtype)
    pages = torch.frombuffer(arena.buffer(), dtype=torch.int64).view(5, -1)
    pages.copy_(torch.randint(0, 2**60, pages.shape))
    before = pages.clone()
    host = arena.read_blocks([3, 1])
    assert host.num_bytes == 2 * bytes_per_block((EVEN, UNEVEN), 2, dtype)
    pages.zero_()
    arena.write_blocks(host, [1, 0], [4, 2])
    assert torch.equal(pages[4], before[1])
    assert torch.equal(pages[2], before[3])
    assert not pages[0].any()


# ---- configuration ----


@pytest.mark.parametrize(
    ("text", "size"),
    [("7", 7), ("512MB", 512 * 10**6), ("1.5 GiB", 3 << 29), ("2kib", 2048), ("3B", 3)],
)
def test_parse_bytes(text: str, size: int) -> None:
    assert parse_bytes(text, field="kv_cache_memory") == size


@pytest.mark.parametrize("text", ["", "MB", "-1MB", "5 apples", "1e3"])
def test_parse_bytes_refuses(text: str) -> None:
    with pytest.raises(ConfigError, match="not a size"):
        parse_bytes(text, field="kv_cache_memory")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("dtype", "int8"),
        ("device", "tpu"),
        ("model_impl", "magic"),
        ("max_model_len", 1),
        ("block_size", 0),
        ("block_size", 4096),
        ("num_kv_blocks", 1),
        ("kv_cache_memory", "much"),
        ("gpu_memory_utilization", 0.0),
        ("gpu_memory_utilization", 1.1),
        ("max_num_seqs", 0),
        ("max_num_batched_tokens", 8),
        ("threads", 0),
        ("preemption_mode", "hope"),
        ("speculative_method", "oracle"),
        ("num_speculative_tokens", 0),
    ],
)
def test_a_bad_value_names_its_option(field: str, value: object) -> None:
    with pytest.raises(ConfigError) as error:
        EngineConfig(model="m", **{field: value})  # type: ignore[arg-type]
    assert error.value.field == field


def test_the_configuration_from_flags_and_environment() -> None:
    config = load(
        EngineConfig,
        {"model": "m", "block_size": "8", "enable_prefix_caching": False},
        {"BATON_DTYPE": "float16", "BATON_MAX_MODEL_LEN": "99"},
    )
    assert (config.block_size, config.dtype, config.max_model_len) == (8, "float16", 99)
    assert not config.enable_prefix_caching
    assert config.model_name == "m"
    assert EngineConfig(model="m", served_model_name=("n", "m")).model_name == "n"


def test_a_directory_is_served_under_its_own_name(tmp_path: Path) -> None:
    model = tmp_path / "tiny"
    model.mkdir()
    assert EngineConfig(model=str(model)).model_name == "tiny"
    assert EngineConfig(model=f"{model}/../tiny/").model_name == "tiny"
    assert EngineConfig(model="owner/name").model_name == "owner/name"


# ---- layer groups, memory of others ----


@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_layers_of_several_groups_share_slots_under_their_own_blocks(dtype: str) -> None:
    sliding = LayerSpec(kv_heads=2, k_dim=3, v_dim=3, window=9)
    arena = KVArena((EVEN, sliding, EVEN, sliding), num_blocks=4, block_size=4, dtype=dtype)
    assert arena.groups.windows == (0, 9)
    assert arena.group_of == (0, 1, 0, 1)
    assert arena.num_bytes == 4 * bytes_per_block((EVEN, EVEN), 4, dtype)
    for block, layer in ((0, 0), (0, 2), (1, 1), (1, 3)):
        k, v = arena.layer(layer)
        k[block], v[block] = layer + 1, layer + 2
    for block, layer in ((0, 0), (0, 2), (1, 1), (1, 3)):
        k, v = arena.layer(layer)
        assert (k[block] == layer + 1).all()
        assert (v[block] == layer + 2).all()
    arena.copy_block(1, 3)
    assert (arena.layer(3)[1][3] == 5).all()
    arena.clear_block(1)
    assert not arena.layer(1)[0][1].any()
    assert (arena.layer(0)[0][0] == 1).all()


def test_an_arena_lives_in_memory_that_it_is_given() -> None:
    size = 3 * bytes_per_block((EVEN, MLA), 4, "int8")
    memory = torch.zeros(size + 100, dtype=torch.uint8)
    arena = KVArena((EVEN, MLA), 3, 4, "int8", memory=lambda *_: memory)
    assert arena.num_bytes == size
    arena.layer(0)[0].fill_(7)
    arena.scales(1)[0].fill_(1.0)
    assert memory[:size].any()
    assert not memory[size:].any()
    assert arena.buffer()[0] == memory[0] == 7
    with pytest.raises(InternalError, match=f"need {size} bytes"):
        KVArena((EVEN, MLA), 3, 4, "int8", memory=lambda *_: memory[: size - 1])

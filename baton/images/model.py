"""ImageModel: what a checkpoint's files say of images in its prompts.

A prompt with images is made in three steps:

    template    writes one marker for each image:   ... <|image_pad|> ...
    rewritten   Gemma 3 alone: line breaks, begin and end around the marker, as text
    placed      each marker, now a token, becomes the tokens of its image (layouts.py)

So a marker in the text of a user would stand for an image that is not there, and take another
one's place. A prompt whose number of markers is not that of its images is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, cast

from baton.images.layouts import FixedCount, ImageLayout, PatchRows, ResizedGrid
from baton.protocol.errors import ContextLengthExceeded, InvalidRequest, ModelRefused
from baton.protocol.images import ImageInput
from baton.text.tokenizer import Tokenizer, read_json

Values = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class ImageFile:
    """An image that was read: its file, the digest of the file (protocol/images.py), and its size
    in pixels as it is shown. `field`: where the client's request has it, for errors."""

    data: bytes
    digest: bytes
    width: int
    height: int
    field: str


@dataclass(frozen=True, slots=True)
class ImageModel:
    """The images of one model. `marker`: what its chat template writes for an image.
    `rewritten_marker`: what takes the marker's place before the text is tokenized. `marker_id`: the
    token of that text which becomes the tokens of `layout`. `reserved`: other tokens that only
    images and videos have; a text with one of them is refused."""

    marker: str
    rewritten_marker: str
    marker_id: int
    reserved: frozenset[int]
    layout: ImageLayout

    @classmethod
    def load(cls, directory: str | Path, tokenizer: Tokenizer) -> ImageModel | None:
        """Read config.json and the processor's files; None if the model reads no images, or has no
        file that says how.

        Raises ModelRefused for files that this code cannot follow."""
        folder = Path(directory)
        config = read_json(folder / "config.json")
        family = _FAMILIES.get(str(config.get("model_type")))
        if family is None:
            return None
        processor = read_json(folder / "processor_config.json")
        images: object = processor.get("image_processor")
        if not isinstance(images, dict):
            images = read_json(folder / "preprocessor_config.json")
        if not images:
            return None
        settings = _Files(folder, config, processor, cast("Values", images), tokenizer)
        for name, wanted in (("do_resize", True), ("do_pan_and_scan", False)):
            if settings.images.get(name) not in (None, wanted):
                raise ModelRefused(f"{folder}: images with {name} {not wanted} are not served")
        return family(settings)

    def rewritten(self, text: str, num_images: int) -> str:
        """Return a rendered text with what this model has around each marker.

        Raises InvalidRequest if the text has another number of markers than images."""
        if text.count(self.marker) != num_images:
            raise self._mismatch(text.count(self.marker), num_images)
        if self.rewritten_marker == self.marker:
            return text
        return text.replace(self.marker, self.rewritten_marker)

    def placed(
        self, ids: Sequence[int], files: Sequence[ImageFile], most_tokens: int
    ) -> tuple[tuple[int, ...], tuple[ImageInput, ...]]:
        """Return the prompt with the tokens of each image in place of its marker, and where they
        stand.

        Raises InvalidRequest if the markers are not one for each file, or an image's shape cannot
        be read (its field is the file's); ContextLengthExceeded for more than `most_tokens`."""
        self.check_plain(ids, len(files))
        prompt: list[int] = []
        images: list[ImageInput] = []
        waiting = iter(files)
        for token in ids:
            if token != self.marker_id:
                prompt.append(token)
                continue
            file = next(waiting)
            tokens = self.tokens_of(file)
            images.append(ImageInput(file.digest, len(prompt), len(tokens), file.data))
            prompt += tokens
            if len(prompt) > most_tokens:
                raise ContextLengthExceeded(
                    f"{file.field}: the prompt up to this image has {len(prompt)} tokens, more than"
                    f" the limit of {most_tokens}",
                    field=file.field,
                )
        return tuple(prompt), tuple(images)

    def check_plain(self, ids: Sequence[int], num_images: int = 0) -> None:
        """Raise InvalidRequest unless a prompt has `num_images` markers, and nothing else that
        stands for images."""
        count = ids.count(self.marker_id)
        if count != num_images:
            raise self._mismatch(count, num_images)
        if not self.reserved.isdisjoint(ids):
            raise InvalidRequest(
                "the text holds tokens that stand for parts of images or videos: write them in"
                " another way"
            )

    def tokens_of(self, file: ImageFile) -> tuple[int, ...]:
        """Return the tokens of one image. Raises InvalidRequest, naming its field."""
        try:
            return self.layout.tokens(file.width, file.height)
        except InvalidRequest as error:
            raise InvalidRequest(f"{file.field}: {error.message}", field=file.field) from error

    def _mismatch(self, num_markers: int, num_images: int) -> InvalidRequest:
        if num_markers < num_images:
            return InvalidRequest(
                f"the prompt has {num_markers} places for {num_images} images: where they stand,"
                f" the chat template writes no {self.marker}"
            )
        return InvalidRequest(
            f"the text holds {self.marker}, which stands for an image, {num_markers} times, and"
            f" there are {num_images} images: write it in another way"
        )


# ---- families ----


@dataclass(frozen=True, slots=True)
class _Files:
    """The files of a model directory. `images`: the settings of its image processor."""

    folder: Path
    config: Values
    processor: Values
    images: Values
    tokenizer: Tokenizer

    def number(self, values: Values, name: str, default: int) -> int:
        found = values.get(name)
        found = default if found is None else found
        if not isinstance(found, int) or isinstance(found, bool) or found < 1:
            raise ModelRefused(f"{self.folder}: {name} of images must be a positive number")
        return found

    def token_id(self, names: Sequence[str], default: int) -> int:
        """Return the id that config.json has under the first of `names` that it has."""
        for name in names:
            if name in self.config:
                return self.number(self.config, name, default)
        return default

    def spelled(self, token_id: int) -> str:
        found = self.tokenizer.token(token_id)
        if found is None:
            raise ModelRefused(f"{self.folder}: the tokenizer has no token {token_id} for images")
        return found

    def id_of(self, token: str) -> int:
        ids = self.tokenizer.encode(token, add_special_tokens=False)
        if len(ids) != 1:
            raise ModelRefused(f"{self.folder}: {token} is no token of the tokenizer")
        return ids[0]

    def edge(self, name: str, default: int) -> int:
        """Return a number of the processor's `size`. A size without that number is refused."""
        size: object = self.images.get("size")
        return self.number(cast("Values", size), name, 0) if isinstance(size, dict) else default


def _qwen(default_token: int) -> Callable[[_Files], ImageModel]:
    """Return the reader of a Qwen's files. `default_token`: of images, if config.json has none."""

    def load(files: _Files) -> ImageModel:
        images = files.images
        patch_size = files.number(images, "patch_size", 14)
        merge_size = files.number(images, "merge_size", 2)
        # Older files have their own names for the two, which go first.
        min_pixels, max_pixels = (
            files.number(images, older, 0) if images.get(older) else files.edge(newer, default)
            for older, newer, default in (
                ("min_pixels", "shortest_edge", 56 * 56),
                ("max_pixels", "longest_edge", 28 * 28 * 1280),
            )
        )
        token_id = files.token_id(("image_token_id", "image_token_index"), default_token)
        video_id = files.token_id(("video_token_id", "video_token_index"), default_token + 1)
        marker = files.spelled(token_id)
        layout = ResizedGrid(token_id, patch_size * merge_size, min_pixels, max_pixels)
        return ImageModel(marker, marker, token_id, frozenset({video_id}), layout)

    return load


def _gemma3(files: _Files) -> ImageModel:
    token_id = files.token_id(("image_token_id", "image_token_index"), 262_144)
    begin = files.spelled(files.token_id(("boi_token_id", "boi_token_index"), 255_999))
    end = files.spelled(files.token_id(("eoi_token_id", "eoi_token_index"), 256_000))
    in_config = files.number(files.config, "mm_tokens_per_image", 256)
    count = files.number(files.processor, "image_seq_length", in_config)
    text = f"\n\n{begin}{files.spelled(token_id)}{end}\n\n"
    return ImageModel(begin, text, token_id, frozenset(), FixedCount(token_id, count))


def _mistral3(files: _Files) -> ImageModel:
    token_id = files.token_id(("image_token_id", "image_token_index"), 10)
    names = (("image_break_token", "[IMG_BREAK]"), ("image_end_token", "[IMG_END]"))
    row_end, image_end = (
        files.id_of(str(files.processor.get(name) or default)) for name, default in names
    )
    patch = files.number(files.processor, "patch_size", 16)
    merge = files.number(files.processor, "spatial_merge_size", 1)
    longest = files.edge("longest_edge", 1024)
    layout = PatchRows(token_id, row_end, image_end, patch * merge, longest)
    marker = files.spelled(token_id)
    return ImageModel(marker, marker, token_id, frozenset({row_end, image_end}), layout)


_QWEN2: Final = _qwen(151_655)
_QWEN3_5: Final = _qwen(248_056)
# The `model_type` of config.json -> how its files say what images are.
_FAMILIES: Final[Mapping[str, Callable[[_Files], ImageModel]]] = {
    "qwen2_5_vl": _QWEN2,
    "qwen3_vl": _QWEN2,
    "qwen3_vl_moe": _QWEN2,
    "qwen3_5": _QWEN3_5,
    "qwen3_5_moe": _QWEN3_5,
    "gemma3": _gemma3,
    "mistral3": _mistral3,
}

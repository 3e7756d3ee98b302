"""Parquet files of encoded images.

    flowers-train.parquet    columns image (bytes, or a struct with `bytes`) and label (a number or a name; a list of
                             them for several labels per image; a decimal number for regression)

Optional columns: `coarse_label`, `family_label` … (label levels), `split`, `mask` (an image of ids), `boxes` with
`labels` (one per box). Class names come from the metadata of the schema: the key `dataset_info` (JSON with
`label_names`, `coarse_label_names` …, `ignore_index`) or Hugging Face's. Splits come from the column, or else from the
file names (…train…, …val… or …test…).

Images stay encoded in arrow memory, which forked workers share. A pickled copy reopens its files.
"""

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np
from PIL import Image

from patchloom.data.buckets.remote_file import AnyFile, RemoteFile, open_any
from patchloom.data.datasets import Listing, Source
from patchloom.data.images.image_store import ImageStore, Mask, Stamp, common_folder, stamps_inside
from patchloom.data.labels.taxonomy import level_columns, levels_of_columns
from patchloom.data.splits import group_by_split, listings_by_split, name_files
from patchloom.data.targets import ImageTargets, labels_of_lists, numbers_of_columns
from patchloom_runtime.errors import DataError, UsageError
from patchloom_runtime.images.decode import decode, decode_ids, refuse_special
from patchloom_runtime.images.samples import UNLABELED
from patchloom_runtime.untrusted import check_shape, parse_json

_IMAGE_COLUMNS = ("image", "img")
_LABEL_COLUMNS = ("label", "fine_label")
MAX_CLASSES = 1_000_000
# The errors that pyarrow raises for damaged files.
PARQUET_FAULTS = (ArithmeticError, LookupError, NotImplementedError, OSError, TypeError, ValueError)
_BOXES = "expected lists of x0, y0, x1, y1, and one class number per box in 'labels'"
_MAX_ERROR_LETTERS = 200  # of a message of pyarrow
_MAX_SPLIT_LETTERS = 1_000  # of the name of a split
# Images are compressed already: a file that expands to more than both is not a dataset.
HARMLESS_BYTES, MAX_EXPANSION = 1 << 30, 64
BYTES_PER_NUMBER, PAGE_HEADERS_BYTES = 4, 1024  # per row of a dictionary column; of a few pages


class ParquetImages(ImageStore):
    """The images, masks and boxes of parquet files, read by row."""

    def __init__(self, files: Sequence[AnyFile]) -> None:
        self.files = tuple(files)
        self.home = common_folder(self.files)
        self.columns = tuple(self._tables[0].schema.names)
        self.info = _metadata(self._tables[0].schema, self.files[0])
        for file, table in zip(self.files, self._tables, strict=True):
            if set(table.schema.names) != set(self.columns) or _metadata(table.schema, file) != self.info:
                raise DataError(f"{file}: other columns or class names than {files[0]}; open them separately")
        self._starts = np.cumsum([0, *(table.num_rows for table in self._tables)])
        self._image = next((name for name in _IMAGE_COLUMNS if name in self.columns), "")
        if not self._image:
            raise DataError(f"{files[0]}: columns {', '.join(self.columns)}; expected one called 'image'")
        names = tuple(self.info.get("label_names", ()))
        # With boxes, a mask holds instance ids; without boxes, class ids.
        self.tells_objects_apart = self._instance_masks = {"mask", "boxes"} <= set(self.columns)
        if "mask" in self.columns:
            self.mask_names = names
            self.mask_ignore = self.info.get("ignore_index")
        if "boxes" in self.columns:
            self.object_names = names[1:] if self._instance_masks else names
        if self._instance_masks and len(names) != 2:
            raise DataError(f"{files[0]}: {len(names)} label_names; instance masks need background and one class")
        if self.object_names and not self._instance_masks and "labels" not in self.columns:
            raise DataError(f"{files[0]}: column 'boxes' without 'labels'; expected one class number per box")

    @cached_property
    def _tables(self) -> list[Any]:
        return [_read(file) for file in self.files]

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_tables"}

    def __len__(self) -> int:
        return int(self._starts[-1])

    def _place(self, index: int) -> tuple[int, int]:
        """Return the number of the file and the row in it."""
        number = int(np.searchsorted(self._starts, index, side="right")) - 1
        return number, index - int(self._starts[number])

    def _value(self, column: str, index: int) -> Any:
        number, row = self._place(index)
        try:
            return self._tables[number][column][row].as_py()
        except PARQUET_FAULTS as error:
            raise DataError(f"{self.where(index)}: column {column!r} cannot be read ({fault_line(error)})") from error

    def column(self, name: str) -> list[Any]:
        """Return all values of a column."""
        try:
            return [value for table in self._tables for value in table[name].to_pylist()]
        except PARQUET_FAULTS as error:
            raise DataError(f"{self.files[0]}: column {name!r} cannot be read ({fault_line(error)})") from error

    def read(self, index: int) -> Image.Image:
        """Decode the image: upright, mode RGB."""
        return decode(self.encoded(index), self.where(index))

    def encoded(self, index: int) -> bytes:
        """Return the encoded image, such as a JPEG."""
        return self._bytes(self._image, index)

    def _bytes(self, column: str, index: int) -> bytes:
        value = self._value(column, index)
        data = value.get("bytes") if isinstance(value, dict) else value
        if not isinstance(data, bytes):
            raise DataError(f"{self.where(index)}: no image bytes in column {column!r}")
        return data

    def where(self, index: int) -> str:
        """Return file and row."""
        number, row = self._place(index)
        return f"{self.files[number]}, row {row}"

    def key(self, index: int) -> str:
        """Return file name and row."""
        number, row = self._place(index)
        return f"{self.files[number].name}, row {row}"

    def stamps(self, rows: Sequence[int]) -> list[Stamp | None]:
        """Return the row and the `file_state` of its file."""
        inside = [(number, str(row)) for number, row in map(self._place, rows)]
        return stamps_inside(self.files, self.home, inside)

    def mask(self, index: int) -> Mask | None:
        if not self.mask_names:
            return None
        ids = decode_ids(self._bytes("mask", index), f"{self.where(index)}, mask")
        return Mask((ids > 0).astype(np.uint8), ids) if self._instance_masks else Mask(ids, None)

    def boxes(self, index: int) -> np.ndarray | None:
        """Return the boxes of the row, each with its class."""
        if not self.object_names:
            return None
        boxes, labels = self._value("boxes", index), 0 if self._instance_masks else self._value("labels", index)
        try:
            if np.array(boxes).dtype.kind not in "iuf" or np.array(labels).dtype.kind not in "iuf":
                raise ValueError("values that are not numbers")
            corners = np.array(boxes, dtype=np.int64)
            if not len(corners):
                return np.zeros((0, 5), dtype=np.int64)
            numbers = np.array(labels, dtype=np.int64)
            rows = np.column_stack([corners[:, :4], np.broadcast_to(numbers, len(corners))])
        except (TypeError, ValueError, IndexError, OverflowError) as error:
            raise DataError(f"{self.where(index)}: no boxes ({fault_line(error)}); {_BOXES}") from error
        if rows.shape[1] != 5:
            raise DataError(f"{self.where(index)}: no boxes ({rows.shape[1] - 1} numbers each); {_BOXES}")
        return rows


def open_parquet(files: Sequence[AnyFile], name: str) -> Source:
    """Open a dataset of parquet files. Splits come from a column `split` or from the file names."""
    by_name = name_files(files)
    groups = group_by_split(list(by_name))
    train = ParquetImages([by_name[file] for file in groups.train])
    listing, notes = _listing(train)
    if "split" in train.columns:
        own, val, test, others = listings_by_split(listing, splits_of_rows(train))
        return Source(name, own, val, notes + others, test=test)
    if groups.unused:
        notes += (f"not used: {', '.join(groups.unused)}",)
    held_out: list[Listing | None] = []
    for files_of_split in (groups.val, groups.test):
        opened = _listing(ParquetImages([by_name[file] for file in files_of_split])) if files_of_split else (None, ())
        held_out.append(opened[0])
        notes += opened[1]
    return Source(name, listing, held_out[0], notes, test=held_out[1])


def _listing(images: ParquetImages) -> tuple[Listing, tuple[str, ...]]:
    """Return the rows with their labels and levels, and notes."""
    rows = np.arange(len(images))
    lists = () if "boxes" in images.columns else ("labels",)
    column = next((name for name in (*_LABEL_COLUMNS, *lists) if name in images.columns), None)
    if column is None:
        names = images.object_names or images.mask_names
        return Listing(images, rows, np.full(len(rows), UNLABELED), names), ()
    if (targets := _targets(images, column)) is not None:
        return Listing(images, rows, np.full(len(rows), UNLABELED), targets.names, targets=targets), ()
    labels, names = _numbered(images, column, "label_names")
    columns = {level: _numbered(images, of, f"{of}_names") for level, of in level_columns(images.columns).items()}
    levels, notes = levels_of_columns(labels, names, columns, images.where)
    return Listing(images, rows, labels, names, levels), notes


def _targets(images: ParquetImages, column: str) -> ImageTargets | None:
    """Return lists of labels, or decimal numbers, as targets; None for a column of classes."""
    values, where = images.column(column), f"{images.files[0]}: column {column!r}"
    filled = [value for value in values if value is not None]
    if filled and all(isinstance(value, float) for value in filled):
        return numbers_of_columns({column: values}, str(images.files[0]))
    if not filled or not all(isinstance(value, list) for value in filled):
        return None
    if others := [label for row in filled for label in row if type(label) not in (int, str)]:
        raise DataError(f"{where} has lists with {_start_of(others[0])}, expected names or numbers of classes")
    names = images.info.get("label_names", ())
    outside = [label for row in filled for label in row if names and not (label in names or label in range(len(names)))]
    if outside:
        raise DataError(f"{where} has {_start_of(outside[0])}, expected names, or numbers from 0 to {len(names) - 1}")
    lists = [
        None if row is None else [names[label] if names and type(label) is int else str(label) for label in row]
        for row in values
    ]
    return labels_of_lists(lists, str(images.files[0]))


def splits_of_rows(images: ParquetImages) -> list[str]:
    """Return the split of each row."""
    values = images.column("split")
    if long := [value for value in values if isinstance(value, str | bytes) and len(value) > _MAX_SPLIT_LETTERS]:
        raise DataError(f"{images.files[0]}: column 'split' has {_start_of(long[0])}…, expected names such as train")
    return list(map(str, values))


def _start_of(value: Any) -> str:
    """Return the start of a value for a message; a cell may have gigabytes."""
    return repr(value[:60] if isinstance(value, str | bytes) else value)[:60]


def _numbered(images: ParquetImages, column: str, names_key: str) -> tuple[np.ndarray, tuple[str, ...]]:
    """Return a label column as numbers and names. Strings are numbered in sorted order."""
    values = images.column(column)
    if names_key != "label_names" and names_key not in images.info:  # a level may have any numbers
        values = [None if value is None else str(value) for value in values]
    filled = [value for value in values if value is not None]
    if filled and isinstance(filled[0], str):
        names = tuple(sorted(set(filled)))
        number = {name: i for i, name in enumerate(names)}
        return np.array([UNLABELED if v is None else number[v] for v in values], dtype=np.int64), names
    if invalid := [value for value in filled if type(value) is not int or value >= MAX_CLASSES]:
        raise DataError(
            f"{images.files[0]}: column {column!r} has {_start_of(invalid[0])}, expected names, or numbers from 0 to "
            f"{MAX_CLASSES - 1:,}"
        )
    names = tuple(images.info.get(names_key, ())) or tuple(str(i) for i in range(max(filled, default=-1) + 1))
    labels = np.array([UNLABELED if value is None else value for value in values], dtype=np.int64)
    outside = np.flatnonzero((labels < UNLABELED) | (labels >= len(names)))
    if len(outside):
        row = int(outside[0])
        raise DataError(f"{images.where(row)}: {column} {labels[row]} is outside 0…{len(names) - 1}")
    return labels, names


def _metadata(schema: Any, file: AnyFile) -> dict[str, Any]:
    """Return `dataset_info`, or the same facts from Hugging Face's description of the columns."""
    stored = schema.metadata or {}
    key = b"dataset_info" if b"dataset_info" in stored else b"huggingface"
    try:
        info = parse_json(stored.get(key, b"{}"))
        return _own_facts(info) if key == b"dataset_info" else _hugging_face_facts(info)
    except ValueError as error:
        raise DataError(f"{file}: its metadata {key.decode()!r} cannot be read ({error})") from error


def _own_facts(info: Any) -> dict[str, Any]:
    check_shape(info, dict)
    facts = {key: info[key] for key in info if key.endswith("label_names") or key == "ignore_index"}
    check_shape(facts, {key: int | None if key == "ignore_index" else list[str] for key in facts})
    return facts


def _hugging_face_facts(info: Any) -> dict[str, Any]:
    check_shape(info, {"info?": {"features?": dict[str, dict]}})
    features = info.get("info", {}).get("features", {})
    named = {name: feature["names"] for name, feature in features.items() if "names" in feature}
    facts = {f"{name.removeprefix('fine_')}_names": named[name] for name in named if name.endswith("label")}
    check_shape(facts, dict[str, list[str]])
    return facts


def fault_line(error: Exception) -> str:
    """Return the message of pyarrow in one line."""
    return (str(error).splitlines() or [type(error).__name__])[0][:_MAX_ERROR_LETTERS]


def _read(file: AnyFile) -> Any:
    try:
        import pyarrow.parquet
    except ImportError:
        raise UsageError(f"{file}: reading parquet needs pyarrow; pip install 'patchloom[parquet]'") from None
    try:
        size = file.size if isinstance(file, RemoteFile) else refuse_special(file, str(file), "a parquet file")
        with open_any(file) as content:
            about = pyarrow.parquet.read_metadata(content)
        if not about.num_columns:  # pyarrow would abort the process
            raise DataError(f"{file}: a table without columns; expected images")
        groups = [about.row_group(i) for i in range(about.num_row_groups)]
        unpacked = sum(group.total_byte_size for group in groups)
        if unpacked > max(HARMLESS_BYTES, MAX_EXPANSION * size):
            raise DataError(
                f"{file}: {size:,} bytes that expand to {unpacked:,}, which no dataset of images does. Refused"
            )
        _read_first_rows(file)
        if isinstance(file, RemoteFile):
            with open_any(file) as content:
                return pyarrow.parquet.read_table(content, read_dictionary=_stored_once(groups))
        return pyarrow.parquet.read_table(file, read_dictionary=_stored_once(groups))
    except PARQUET_FAULTS as error:
        raise DataError(f"{file}: cannot be read as parquet ({fault_line(error)})") from error


def _read_first_rows(file: AnyFile) -> None:
    """Read one row of each group. For some damaged columns pyarrow aborts the process unless they are read first."""
    import pyarrow.parquet

    with open_any(file) as content, pyarrow.parquet.ParquetFile(content) as table:
        for group in range(table.num_row_groups):
            next(table.iter_batches(batch_size=1, row_groups=[group]), None)


def _stored_once(groups: Sequence[Any]) -> list[str]:
    """Return columns that store equal values once, to be read the same way: expanded, they could take gigabytes."""
    chunks = [group.column(i) for group in groups for i in range(group.num_columns)]
    return sorted({chunk.path_in_schema for chunk in chunks if _holds_numbers_of_values(chunk)})


def _holds_numbers_of_values(chunk: Any) -> bool:
    """Return whether the rows of a chunk are so small that they can only index its dictionary."""
    if chunk.physical_type != "BYTE_ARRAY" or not chunk.has_dictionary_page or not chunk.num_values:
        return False
    rows = chunk.total_compressed_size - (chunk.data_page_offset - chunk.dictionary_page_offset)
    return rows <= BYTES_PER_NUMBER * chunk.num_values + PAGE_HEADERS_BYTES

"""Remove the fix of each fault of the second attack, and watch the test of the fault fail.

    python -m tests.reliability.removed_fixes [--point 2 …] [--write]

Each row of `FIXES` takes a fix out of a copy of the repository and runs its test there. `--write` writes the table of
docs/internals/security_tests.md. The exit code is 1 if a test passes without its fix.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "internals" / "security_tests.md"
TABLE = "| Point | Without the fix | Test | How it fails |\n|---|---|---|---|\n"
COPIED = ("patchloom", "runtime", "tests", "tools", "docs", "pyproject.toml", "constraints.txt", "mkdocs.yml")
LIMIT_S = 180
RUNTIME, DATA, SERVING = "runtime/patchloom_runtime", "patchloom/data", "patchloom/serving"


class RemovedFix(NamedTuple):
    """A fix that is taken out: in each file, a piece of code becomes another."""

    point: int
    without: str
    edits: tuple[tuple[str, str, str], ...]  # file, code, what replaces it
    test: str


def _fix(point: int, without: str, file: str, old: str, new: str, test: str) -> RemovedFix:
    return RemovedFix(point, without, ((file, old, new),), test)


HOSTILE = "tests/runtime/test_hostile_artifacts.py::test_"
PROGRAM, ONNX = f"{RUNTIME}/engines/torch_program.py", f"{RUNTIME}/engines/onnx_check.py"
READS = "            members = _read_members(path)\n"
MASKS, COCO, LOOP = f"{RUNTIME}/images/object_masks.py", f"{DATA}/annotations/coco.py", "patchloom/engine/loop.py"
WEIGHTS = "patchloom/models/pretrained/weights_file.py"
DEVICES = "tests/engine/test_device_faults.py::test_"
DAMAGED = "tests/reliability/test_damaged_data.py::test_"
PAGE_PY, HOSTS = f"{SERVING}/page.py", f"{SERVING}/hosts.py"
FIXES = (
    # 1: artifacts of torch
    _fix(1, "torch's loader opens the file first, as before", PROGRAM,
         READS, f"            torch.export.load(path)\n{READS}",
         f"{HOSTILE}no_pickle_in_a_program_is_opened"),
    _fix(1, "an operator may be any attribute of torch", PROGRAM,
         '    if parts is None or parts[1] != "aten"',
         '    if parts is None:\n        return operator.attrgetter(target.removeprefix("torch."))(torch)\n'
         '    if parts[1] != "aten"',
         f"{HOSTILE}an_operator_that_no_export_uses_is_refused"),
    _fix(1, "torch evaluates the text of sizes", PROGRAM,
         READS, f"            torch.export.load(path)\n{READS}",
         f"{HOSTILE}text_that_torch_would_evaluate_is_not_looked_at"),
    _fix(1, "members of any name", PROGRAM,
         "if not _MEMBERS.fullmatch(name) or name in members or each.compress_type != zipfile.ZIP_STORED:", "if False:",
         f"{HOSTILE}an_archive_of_another_form_is_refused"),
    _fix(1, "a new call of torch's loader that nobody lists", PROGRAM,
         READS, f"            torch.export.load(path)\n{READS}",
         "tests/architecture/test_loaders.py::test_every_loader_is_listed_with_its_reason"),
    # 2: files that `app` serves
    RemovedFix(2, "the report may be a link, a pipe or of any size",
               ((PAGE_PY, "with suppress(OSError), open_plain(path, links=False):", "if os.path.exists(path):"),
                (PAGE_PY, "asyncio.to_thread(read_plain, self.report, links=False)",
                 'asyncio.to_thread(lambda: open(self.report, "rb").read())')),
               "tests/serving/test_page.py::test_the_report_is_a_plain_file_of_the_run"),
    # 3: images of an index
    _fix(3, "thumbnails of any path in an index", f"{RUNTIME}/images/inputs.py",
         "real = path if roots is None else path_within(path, roots)", "real = path",
         "tests/serving/test_thumbnails.py::test_only_files_in_the_named_folders_are_read"),
    _fix(3, "a link that appears after the check is followed", f"{RUNTIME}/images/inputs.py",
         "links=roots is None)", "links=True)",
         "tests/serving/test_thumbnails.py::test_a_link_that_appears_after_the_check_is_not_followed"),
    # 4: DNS rebinding
    _fix(4, "any host", HOSTS, "if hosts and not self._accepts(hosts[0]):", "if False:",
         "tests/serving/test_hosts.py::test_a_request_names_a_host_of_the_server"),
    _fix(4, "any text after the colon: localhost:evil.example", HOSTS, "self._any or host in self._names",
         'self._any or host.startswith("localhost:") or host in self._names',
         "tests/serving/test_hosts.py::test_a_request_names_a_host_of_the_server"),
    _fix(4, "two Host headers", HOSTS, "if len(hosts) > 1 or not (self._any or any(hosts)):", "if False:",
         "tests/serving/test_hosts.py::test_a_request_has_one_host"),
    _fix(4, "posts of other pages", HOSTS, "if foreign or sites:", "if False:",
         "tests/serving/test_hosts.py::test_another_page_posts_nothing"),
    # 5: floors, graphs
    _fix(5, "an older torch is allowed", "pyproject.toml", '"torch>=2.10"', '"torch>=2.6"', "tests/test_release.py"),
    _fix(5, "an older timm is allowed", "pyproject.toml", '"timm>=1.0.28"', '"timm>=1.0.20"', "tests/test_release.py"),
    _fix(5, "weights in another file", ONNX,
         'if fields.get("external_data") or any(fields.get("data_location", [])):', "if False:",
         f"{HOSTILE}a_graph_that_no_export_writes_is_refused"),
    _fix(5, "an operator may create any number of values", ONNX, "if not count <= MOST_VALUES:", "if False:",
         f"{HOSTILE}a_graph_that_no_export_writes_is_refused"),
    _fix(5, "no bound on memory", f"{RUNTIME}/engines/onnx.py", "    _limit_memory()\n", "",
         f"{HOSTILE}a_graph_that_doubles_its_tensor_stays_within_its_memory"),
    _fix(5, "no bound on time", f"{RUNTIME}/engines/onnx.py", "            timeout.start()", "            pass",
         f"{HOSTILE}a_graph_that_takes_too_long_is_ended"),
    # 6: slow bodies
    _fix(6, "a slow body keeps its slot", f"{SERVING}/uploads.py", "            self._cut_slowest()",
         '            raise overloaded("all slots are taken", 1)',
         "tests/serving/test_uploads.py::test_the_slowest_body_gives_its_slot_to_a_new_one"),
    _fix(6, "any byte in time is enough, at any rate", f"{SERVING}/uploads.py",
         "self.timer.reschedule(min(self.ends + size / BYTES_PER_SECOND, latest))", "self.timer.reschedule(latest)",
         "tests/serving/test_uploads.py::test_a_body_below_the_rate_is_cut_after_the_grace_period"),
    # 7: thumbnails
    _fix(7, "any number of pixels", f"{SERVING}/thumbnails.py", "if side and pixels > PIXELS:", "if False:",
         "tests/serving/test_thumbnails.py::test_the_thumbnails_of_one_answer_are_bounded"),
    _fix(7, "the model waits for thumbnails", f"{SERVING}/app.py",
         "self.hosts, self.thumbnails = hosts or Hosts(), thumbnails",
         "self.hosts, self.thumbnails = hosts or Hosts(), thumbnails and processes",
         "tests/serving/test_thumbnails.py::test_the_model_answers_while_thumbnails_are_made"),
    # 8: a stopped model process
    _fix(8, "missed heartbeats are not counted", f"{SERVING}/processes.py",
         "if process.is_silent != (process in self.silent):", "if False:",
         "tests/serving/test_shedding.py::test_a_process_without_heartbeats_is_not_ready_until_they_come_again"),
    # 9: overload
    RemovedFix(9, "the queue is bounded in length alone",
               ((f"{SERVING}/admission.py", "if expected > self.limits.deadline_seconds / SLOWDOWN:", "if False:"),
                (f"{SERVING}/admission.py", "if expected > QUEUE_SECONDS and", "if False and")),
               "tests/serving/test_shedding.py::test_accepted_requests_are_in_time_and_the_model_stays_busy"),
    # 10: work per image
    _fix(10, "no bound on points, pixels and polygons", MASKS,
         "        if self._left[what] < 0:", "        if False:",
         "tests/runtime/test_object_masks.py::test_the_work_of_one_image_is_bounded"),
    _fix(10, "each object is a mask of the whole image", MASKS,
         "            masks.append(_from_coco(outline, size, budget))",
         "            whole, mask = np.zeros(size, bool), _from_coco(outline, size, budget)\n"
         "            whole[mask.window] = mask.bits\n            masks.append(ObjectMask(0, 0, whole))",
         "tests/runtime/test_object_masks.py::test_an_object_costs_what_it_covers"),
    _fix(10, "any number of objects", MASKS, "    if count > MOST_OBJECTS:",
         "    if False:", f"{DAMAGED}thousands_of_objects_on_a_large_image"),
    _fix(10, "entries of one image are not joined", COCO, "        elif count > 1:",
         "        elif False:", f"{DAMAGED}a_hundred_thousand_references_to_one_image"),
    # 11: tracebacks
    _fix(11, "keys of YOLO's names are sorted", f"{DATA}/annotations/yolo.py",
         "if isinstance(names, dict) and names.keys() == set(range(len(names))):\n"
         "        names = [names[i] for i in range(len(names))]",
         "if isinstance(names, dict):\n        names = [names[i] for i in sorted(names)]",
         "tests/data/test_objects.py::test_names_of_yolo_that_are_none"),
    _fix(11, "COCO's area is any number", COCO,
         "if type(value) in (int, float) and 0 <= value < 1 << 63:\n        return float(value)",
         "if type(value) in (int, float):\n        return float(int(value))",
         "tests/data/test_objects.py::test_numbers_of_coco_beyond_floats"),
    _fix(11, "numbers of a polygon are of any size", MASKS,
         "    except (ValueError, OverflowError) as error:  # an odd", "    except ValueError as error:  # an odd",
         "tests/data/test_objects.py::test_numbers_of_coco_beyond_floats"),
    _fix(11, "VOC's numbers are what Python accepts", f"{RUNTIME}/untrusted.py",
         'if not text.isascii() or "_" in text or not math.isfinite(number := float(text)):',
         "if not math.isfinite(number := float(text)):",
         "tests/data/test_objects.py::test_numbers_are_plain_digits"),
    _fix(11, "COCO names any file", COCO, "    if path is None:\n        outside",
         "    if path is None:\n        return os.path.join(folder, name)\n        outside",
         "tests/data/test_objects.py::test_coco_names_images_of_its_own_folder_alone"),
    _fix(11, "a full temporary folder is no error of its own", "patchloom/disk.py",
         "with disk_errors(place), tempfile.TemporaryDirectory() as folder, disk_errors(place):",
         "with tempfile.TemporaryDirectory() as folder:",
         "tests/export/test_export.py::test_a_full_temporary_folder_is_named"),
    _fix(11, "a library that cannot be mapped", "patchloom/cli/__init__.py",
         '_NO_MEMORY = ("failed to map segment", "annot allocate memory")', '_NO_MEMORY = ("\\0",)',
         "tests/reliability/test_strangers.py::test_a_library_without_room_is_one_line"),
    _fix(11, "a failing disk is like any other error", "patchloom/disk.py", "        if error.errno == errno.EIO:",
         "        if False:", "tests/reliability/test_strangers.py::test_a_failing_disk_is_said_in_a_sentence"),
    _fix(11, "tensors in nested lists are found by recursion", WEIGHTS,
         "    tensors, rest, visited = [], [value], set()\n",
         "    if isinstance(value, list):\n        return [tensor for one in value for tensor in _tensors(one)]\n"
         "    tensors, rest, visited = [], [value], set()\n",
         "tests/reliability/test_untrusted_weights.py::test_bad_weights_are_refused_in_one_line"),
    _fix(11, "a sparse or meta tensor is built", "patchloom/models/pretrained/torch_file.py",
         '    "torch.Size": torch.Size,\n',
         '    "torch.Size": torch.Size,\n'
         '    "torch._utils._rebuild_sparse_tensor": lambda layout, data: torch.sparse_coo_tensor(*data[:3]),\n'
         '    "torch.serialization._get_layout": lambda name: getattr(torch, name.removeprefix("torch.")),\n',
         "tests/reliability/test_untrusted_weights.py::test_bad_weights_are_refused_in_one_line"),
    # 12: leftovers
    _fix(12, "leftovers of dead processes stay", "patchloom/disk.py",
         "is_leftover = not _is_running(int(process), int(started))", "is_leftover = False",
         "tests/reliability/test_strangers.py::test_a_killed_index_build_leaves_nothing_behind"),
    # 13: what fuzzing found
    _fix(13, "a tar's header may declare gigabytes", f"{DATA}/trees/archive.py",
         "if size is None or not 0 <= size <= _MAX_READ_BYTES:", "if False:",
         "tests/data/test_archives.py::test_a_header_that_declares_gigabytes_is_not_read"),
    _fix(13, "a member of a zip may have 2⁶³ bytes", f"{DATA}/trees/archive.py",
         "if max(info.header_offset, info.compress_size, info.file_size) > _MAX_MEMBER_BYTES:", "if False:",
         "tests/fuzz/test_fuzz.py::test_every_kept_input_is_read_or_refused_in_one_line[zip]"),
    _fix(13, "a parquet file without columns", f"{DATA}/sources/parquet.py", "if not about.num_columns:", "if False:",
         "tests/fuzz/test_fuzz.py::test_every_kept_input_is_read_or_refused_in_one_line[parquet]"),
    _fix(13, "rows in the cache of `check` have no checksum", f"{DATA}/checking/scan_cache.py",
         "or _crc32(tuple(values)) != crc32:", "or False:",
         "tests/reliability/test_damaged_folders.py::test_rows_of_another_kind_begin_the_cache_anew"),
    _fix(13, "any error of a fuzzed reader passes", "tests/fuzz/targets.py", "    except PatchloomError as error:\n",
         "    except KeyError:\n        pass\n    except PatchloomError as error:\n",
         "tests/fuzz/test_fuzz.py::test_only_errors_of_patchloom_pass"),
    # 14: power cuts
    _fix(14, "new files are not synced", "patchloom/disk.py", "        os.fsync(file.fileno())\n    return hashlib",
         "    return hashlib",
         "tests/reliability/test_power_cuts.py::test_a_run_has_its_last_checkpoint_and_all_that_it_counts_on"),
    _fix(14, "the folder of a new name is not synced", "patchloom/disk.py",
         "            sync_folder(path.parent)\n        except", "        except",
         "tests/reliability/test_power_cuts.py::test_an_index_an_export_and_a_sweep_are_old_or_new"),
    # 15: devices
    _fix(15, "a lack of memory is like any other error", LOOP,
         "if is_out_of_memory(error):\n                clear", "if False:\n                clear",
         f"{DEVICES}without_memory_every_step_is_saved"),
    _fix(15, "steps before a lack of memory are not saved", LOOP,
         "            self._save_before_step(*before)\n", "",
         f"{DEVICES}without_memory_every_step_is_saved"),
    _fix(15, "a step that changed statistics is saved", LOOP,
         " or self.progress.step == self._saved_step or buffers:", " or self.progress.step == self._saved_step:",
         f"{DEVICES}a_step_that_changed_the_networks_statistics_is_not_saved"),
    _fix(15, "a failed device is like any other error", LOOP,
         "if is_device_failure(error):\n                saved", "if False:\n                saved",
         f"{DEVICES}a_failed_device_leaves_the_last_checkpoint"),
    _fix(15, "a failed device is saved from", LOOP,
         "except DeviceError:\n            raise\n        except ResourceError:", "except ResourceError:",
         f"{DEVICES}a_failed_device_leaves_the_last_checkpoint"),
    _fix(15, "a loss of NaN updates the weights", LOOP, "        if is_bad(loss):",
         "        if False:", "tests/engine/test_loop.py::test_a_bad_loss_stops_before_the_update"),
    _fix(15, "a model process goes on with a failed device", f"{SERVING}/model_process.py",
         "        _end_with_device(error)\n", "",
         "tests/reliability/test_device_faults.py::test_a_model_process_ends_with_its_device"),
    _fix(15, "predictions of NaN are answers", "patchloom/inference/classifier.py",
         "                raise not_finite(printable(name))", "                pass",
         "tests/reliability/test_device_faults.py::test_answers_that_are_not_finite_are_an_error"),
    _fix(15, "a batch without memory is refused as a whole", f"{SERVING}/model_process.py",
         "        if len(group) == 1:\n            return {group[0].number: _error_result(error)}",
         "        return {request.number: _error_result(error) for request in group}",
         "tests/reliability/test_device_faults.py::test_a_batch_without_memory_is_answered_one_by_one"),
)  # fmt: skip


def main() -> int:
    """Remove the fixes, one after another."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--point", type=int, nargs="+", default=[])
    parser.add_argument("--write", action="store_true", help=f"write the table of {PAGE.relative_to(ROOT)}")
    options = parser.parse_args()
    chosen = [fix for fix in FIXES if not options.point or fix.point in options.point]
    with tempfile.TemporaryDirectory() as folder:
        for name in COPIED:
            copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copyfile
            copy(ROOT / name, Path(folder, name))
        rows = []
        for fix in chosen:
            rows.append((fix, without(fix, Path(folder))))
            print(_row(*rows[-1]), flush=True)
    if options.write:
        intro = PAGE.read_text().partition(TABLE)[0]
        PAGE.write_text(intro + TABLE + "".join(f"{_row(*row)}\n" for row in rows))
    return int(any(not failure for _, failure in rows))


def without(fix: RemovedFix, folder: Path) -> str:
    """Return how the test fails in a copy of the repository without the fix; '' if it passes."""
    before = {file: (folder / file).read_text() for file, _, _ in fix.edits}
    try:
        for file, old, new in fix.edits:
            (folder / file).write_text((folder / file).read_text().replace(old, new))
        return _failure(fix.test, folder)
    finally:
        for file, text in before.items():
            (folder / file).write_text(text)


def _failure(test: str, folder: Path) -> str:
    paths = os.pathsep.join([str(folder), str(folder / "runtime"), *sys.path[1:]])
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-n", "0", "-p", "no:cacheprovider", "--no-header", test]
    environment = os.environ | {"PYTHONPATH": paths, "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        done = subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return f"it does not end within {LIMIT_S} s"
    if done.returncode < 0:
        return f"its process ends with signal {-done.returncode}"
    errors = re.findall(r"^E +(\S.*)$", done.stdout, re.MULTILINE)
    if done.returncode and not errors:
        return (done.stdout + done.stderr).strip().splitlines()[-1]
    return errors[0] if done.returncode else ""


def _row(fix: RemovedFix, failure: str) -> str:
    cells = (fix.point, fix.without, f"`{fix.test}`", f"`{_short(failure)}`" if failure else "**it passes**")
    return f"| {' | '.join(map(str, cells))} |"


def _short(text: str) -> str:
    """Return the start of a failure without paths of the copy and signs that mean something in a table."""
    text = re.sub(r"/tmp/[\w./-]+/", "…/", text).replace("|", "/").replace("`", "'")
    return text if len(text) <= 100 else f"{text[:100]}…"


if __name__ == "__main__":
    sys.exit(main())

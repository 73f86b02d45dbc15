# SPDX-License-Identifier: Apache-2.0
"""A check that cannot fail is worth nothing: each is run on a tree with one thing wrong."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
LICENCE = "// SPDX-License-Identifier: Apache-2.0\n"


def run(check: str, root: Path) -> tuple[int, str]:
    result = subprocess.run([sys.executable, str(HERE / check), str(root)], check=False,
                            capture_output=True, text=True)
    return result.returncode, result.stdout + result.stderr


def write(root: Path, name: str, body: str) -> None:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(LICENCE + body)


@pytest.mark.parametrize(("name", "include", "word"), [
    ("src/pagoda/base/x.cpp", '"pagoda/io/swap_space.h"', "base/ may not include io/"),
    ("src/pagoda/io/x.h", '"pagoda/device/stream.h"', "io/ may not include device/"),
    ("src/pagoda/pager/x.h", '"pagoda/prefetch/trace.h"', "pager/ may not include prefetch/"),
    ("src/pagoda/engine/x.h", '"pagoda/torch/observer.h"', "engine/ may not include torch/"),
    ("src/pagoda/io/uring/x.cpp", '"pagoda/kernels/adam.h"', "io/ may not include kernels/"),
    ("src/pagoda/engine/x.h", "<ATen/core/Tensor.h>", "include torch"),
    ("src/pagoda/kernels/x.cpp", "<torch/torch.h>", "include torch"),
    ("cli/main.cpp", "<c10/core/Device.h>", "include torch"),
    ("src/pagoda/io/x.cpp", '"swap_space.h"', "as a path from src/"),
    ("src/pagoda/misc/x.cpp", "<vector>", "not a layer of the design"),
    ("src/pagoda/engine/x.cpp", '"pagoda/pager/page_record.h"', "is private to src/pagoda/pager/"),
])
def test_a_wrong_include_is_found(tmp_path: Path, name: str, include: str, word: str) -> None:
    write(tmp_path, name, f"#include {include}\n")
    code, output = run("layers.py", tmp_path)
    assert code == 1
    assert word in output
    assert name in output


def test_right_includes_pass(tmp_path: Path) -> None:
    write(tmp_path, "src/pagoda/pager/x.h", '#include "pagoda/comm/group.h"\n#include <vector>\n')
    write(tmp_path, "src/pagoda/torch/x.h", '#include <torch/library.h>\n#include "pagoda/io/x.h"\n')
    write(tmp_path, "tests/unit/torch/x.cpp", "#include <ATen/ATen.h>\n")
    write(tmp_path, "cli/main.cpp", '#include "pagoda/torch/version.h"\n')
    assert run("layers.py", tmp_path)[0] == 0


def test_an_empty_tree_does_not_pass(tmp_path: Path) -> None:
    assert run("layers.py", tmp_path)[0] == 1
    assert run("formatting.py", tmp_path)[0] == 1
    assert run("documents.py", tmp_path)[0] == 1


def test_bad_formatting_is_found(tmp_path: Path) -> None:
    shutil.copy(HERE.parent.parent / ".clang-format", tmp_path)
    write(tmp_path, "src/pagoda/base/x.cpp", "int x = 1;\n")
    assert run("formatting.py", tmp_path)[0] == 0
    write(tmp_path, "src/pagoda/base/x.cpp", "int  x=1 ;\n")
    assert run("formatting.py", tmp_path)[0] == 1


def test_a_missing_licence_line_is_found(tmp_path: Path) -> None:
    shutil.copy(HERE.parent.parent / ".clang-format", tmp_path)
    write(tmp_path, "src/pagoda/base/x.cpp", "int x = 1;\n")
    (tmp_path / "src/pagoda/base/x.cpp").write_text("int x = 1;\n")
    code, output = run("formatting.py", tmp_path)
    assert code == 1
    assert "SPDX" in output


@pytest.mark.parametrize(("text", "word"), [
    ("see [this](notes/gone.md)", "leads nowhere: notes/gone.md"),
    ("`base/gone.cpp` does it", "no file base/gone.cpp"),
])
def test_a_file_that_is_not_there_is_found(tmp_path: Path, text: str, word: str) -> None:
    write(tmp_path, "src/pagoda/base/x.cpp", "int x = 1;\n")
    right = "`base/x.cpp`, [x](src/pagoda/base/x.cpp), [far](https://example.org), `zero_to_fp32.py`\n"
    (tmp_path / "README.md").write_text(right)
    assert run("documents.py", tmp_path)[0] == 0
    (tmp_path / "README.md").write_text(right + text)
    code, output = run("documents.py", tmp_path)
    assert code == 1
    assert "README.md:2: " in output and word in output


@pytest.mark.parametrize(("table", "word"), [
    (["`Outer`, `Middle` *slow*"], "threads.md: the table of locks has no row for Inner"),
    (["`Outer`, `Middle`", "`Inner`, `Gone`"], "threads.md:6: src/pagoda/base/lock_rank.h has no lock Gone"),
    (["`Outer`", "`Inner`", "`Middle`"], "threads.md:7: src/pagoda/base/lock_rank.h has Middle before Inner"),
    (["`Outer`, `Outer`", "`Middle`", "`Inner`"], "threads.md:5: src/pagoda/base/lock_rank.h has Outer before Outer"),
    (["`Inner`, `Outer`", "`Middle`"], "threads.md:5: src/pagoda/base/lock_rank.h has Outer before Inner"),
])
def test_a_table_of_locks_that_drifts_is_found(tmp_path: Path, table: list[str], word: str) -> None:
    write(tmp_path, "src/pagoda/base/lock_rank.h", "enum class LockRank : std::uint8_t {\n  // a/\n"
          "  Outer,\n  Middle,\n  // b/\n  Inner,\n  kCount\n};\n")
    notes = tmp_path / "docs/notes/threads.md"
    notes.parent.mkdir(parents=True)

    def check(rows: list[str]) -> tuple[int, str]:
        cells = "".join(f"| {row} | `what` | `Inner` |\n" for row in rows)
        notes.write_text(f"| `fetch/N` | `Pager` |\n## Locks, outermost first\n| lock | guards |\n| --- | --- |\n"
                         f"{cells}## A new lock\n| `Other` |\n")
        return run("documents.py", tmp_path)

    assert check(["`Outer`, `Middle` *slow*", "`Inner`"])[0] == 0
    code, output = check(table)
    assert code == 1
    assert word in output


@pytest.mark.parametrize("name", ["unit_io", "unit_io/Kinds/Io.Reads/uring  # GetParam() = uring"])
def test_the_summary_says_how_a_test_died(tmp_path: Path, name: str) -> None:
    case = f'<testcase name="{name}" time="1.25" status="fail"><system-out>x</system-out></testcase>'
    (tmp_path / "release.xml").write_text(f"<testsuite>{case}</testsuite>")
    (tmp_path / "release.log").write_text(f"Tests FAILED:\n\t  7 - {name} (SIGPIPE)  unit\n")
    code, output = run("../../scripts/test_summary.py", tmp_path)
    assert code == 1
    assert f"FAILED release: {name} (SIGPIPE after 1.2 s)" in output
    assert "0 passed, 1 failed" in output


def test_the_summary_shows_what_failed_alone(tmp_path: Path) -> None:
    said = ["[ RUN      ] A.Passes", "noise", "[       OK ] A.Passes (0 ms)",
            "[ RUN      ] A.Races", "WARNING: ThreadSanitizer: data race", "[       OK ] A.Races (0 ms)",
            "[ RUN      ] A.Fails", "x.cpp:1: Failure", "[  FAILED  ] A.Fails (0 ms)",
            "[ RUN      ] A.Dies", *(f"line {i}" for i in range(500))]
    case = '<testcase name="a" time="1" status="fail"><system-out>{}</system-out></testcase>'
    (tmp_path / "tsan.xml").write_text(f"<testsuite>{case.format(chr(10).join(said))}</testsuite>")
    code, output = run("../../scripts/test_summary.py", tmp_path)
    assert code == 1
    assert "A.Passes" not in output and "noise" not in output
    assert all(word in output for word in ("data race", "x.cpp:1: Failure", "A.Dies", "line 499"))
    assert len(output.splitlines()) < 140
    assert output.splitlines()[-2].startswith("FAILED tsan: a (")

"""The kernels' tests under AddressSanitizer and UndefinedBehaviorSanitizer: `make test-kernels`.

Python itself is not instrumented, so the sanitizers' library has to be loaded before it: this script starts itself again with it.
Leaks are not looked for: an interpreter has many that are none.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

FLAGS = ("-O1", "-fsanitize=address,undefined", "-fno-sanitize-recover=undefined", "-fno-omit-frame-pointer", "-g1")
TESTS = ("tests/ops", "tests/rollout/native/test_kv_cache.py", "tests/rollout/native/test_forward.py")


def main() -> int:
    """Exit code of pytest, or 2 where there is no compiler."""
    compiler = os.environ.get("CXX", "g++")
    if "LD_PRELOAD" not in os.environ:
        try:
            asked = ("libasan.so", "libubsan.so")
            paths = [
                subprocess.run([compiler, f"-print-file-name={name}"], capture_output=True, text=True, check=True) for name in asked
            ]
        except OSError as error:
            print(f"the sanitizers need a compiler: {error}", file=sys.stderr)
            return 2
        found = [os.path.realpath(path.stdout.strip()) for path in paths]
        if missing := [name for name, path in zip(asked, found, strict=True) if not os.path.isfile(path)]:
            print(f"the sanitizers need {', '.join(missing)}, which {compiler} does not bring", file=sys.stderr)
            return 2
        os.environ["LD_PRELOAD"] = ":".join(found)
        os.environ["ASAN_OPTIONS"] = "detect_leaks=0:abort_on_error=0:exitcode=99"
        os.environ["UBSAN_OPTIONS"] = "print_stacktrace=1"
        os.environ["CXX"] = compiler
        os.execv(sys.executable, [sys.executable, __file__, *sys.argv[1:]])
    import pytest

    root = Path(__file__).parents[3]
    os.chdir(root)
    sys.path.insert(0, "tests/fixtures")
    from kernel_build import build

    with tempfile.TemporaryDirectory() as folder:
        done = build(Path(folder), CXXFLAGS=" ".join(FLAGS))
        assert done.returncode == 0, done.stderr
        sys.path.insert(0, f"{folder}/lib")
        from groupwise.ops.operations import absence

        assert absence() is None, absence()
        arguments = sys.argv[1:] or [path for path in TESTS if (root / path).exists()]
        return int(pytest.main(["-q", "-x", "-p", "no:cacheprovider", "-m", "not slow", *arguments]))


if __name__ == "__main__":
    sys.exit(main())

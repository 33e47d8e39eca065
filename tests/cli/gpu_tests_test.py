#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""gpu_tests_test SOURCE: tools/gpu_tests with test programs that pass, fail, crash and hang."""
import pathlib
import re
import subprocess
import sys
import tempfile
import time
import unittest

TOOL = pathlib.Path(sys.argv[1]).resolve() / "tools/gpu_tests"

ROUNDS = '''#!{python}
import os, subprocess, sys, time
here = os.path.dirname(os.path.abspath(__file__))
if sys.argv[1] == "--gtest_list_tests":
    print("Running main() from somewhere\\nRounds.")
    for name in {names!r}:
        print("  " + name + "  # GetParam() = 2 ranks")
    sys.exit(0)
tests = sys.argv[1].removeprefix("--gtest_filter=").split(":")
failed = False
for test in tests:
    print("[ RUN      ] " + test, flush=True)
    with open(here + "/calls", "a") as calls:
        calls.write(f"{{test}} gpus={{os.environ['CUDA_VISIBLE_DEVICES']}} devices={{os.environ['TOKENYARD_TEST_DEVICES']}} "
                    f"patience={{os.environ['TOKENYARD_TEST_PATIENCE']}} tests={{len(tests)}}\\n")
    if "crashes" in test:
        os.kill(os.getpid(), 11)
    if "hangs" in test:
        child = subprocess.Popen(["sleep", "60"])
        with open(here + "/child", "w") as file:
            file.write(str(child.pid))
        child.wait()
    if "fails" in test:
        print("unknown file: Failure\\nthe reason\\n[  FAILED  ] " + test + ", where GetParam() = 2 ranks (3 ms)")
        failed = True
    elif "skips" in test:
        print("[  SKIPPED ] " + test + " (0 ms)")
    else:
        print("[       OK ] " + test + " (3 ms)")
sys.exit(1 if failed else 0)
'''


class GpuTests(unittest.TestCase):
    def play(self, names, *options):
        memory = tempfile.TemporaryDirectory()
        self.addCleanup(memory.cleanup)
        self.folder = pathlib.Path(memory.name)
        program = self.folder / "gpu_round_tests"
        program.write_text(ROUNDS.format(python=sys.executable, names=names))
        program.chmod(0o755)
        result = subprocess.run(
            [sys.executable, TOOL, "--build", ".", "--out", "log", *options], capture_output=True, text=True, timeout=60,
            check=False, cwd=self.folder, env={"PATH": "/usr/bin:/bin", "CUDA_VISIBLE_DEVICES": "4,7"})
        calls = self.folder / "calls"
        self.calls = dict(line.split(" ", 1) for line in calls.read_text().splitlines()) if calls.exists() else {}
        return result

    def test_every_test_runs_once_where_it_belongs(self):
        shared = [f"Play/{i}_shared_threads" for i in range(50)]
        result = self.play([*shared, "Play/a_spread_threads", "Play/b_shared_processes", "Play/skips_shared",
                            "Cleanup.GivesTheMemoryBack/2_shared"])
        self.assertEqual(result.returncode, 0, result.stdout + result.stderr)
        self.assertEqual(len((self.folder / "calls").read_text().splitlines()), 54)
        of_shared = [self.calls["Rounds." + name] for name in shared]
        self.assertTrue(all(re.match(r"gpus=[47] devices=1 patience=4 tests=1[0-2]\n?$", call) for call in of_shared))
        self.assertEqual({call[5] for call in of_shared}, {"4", "7"})
        for name in ("Play/a_spread_threads", "Play/b_shared_processes", "Cleanup.GivesTheMemoryBack/2_shared"):
            self.assertEqual(self.calls["Rounds." + name], "gpus=4,7 devices=2 patience=4 tests=1")
        self.assertRegex(result.stdout, r"2 GPUs +53 passed, +1 skipped, +0 failed, +0 left out")
        self.assertIn("[       OK ] Rounds.Play/49_shared_threads", (self.folder / "log").read_text())

    def test_what_failed_is_told(self):
        result = self.play(["ok_shared", "fails_shared", "ok2_shared"])
        self.assertEqual(result.returncode, 1)
        self.assertIn("FAILED Rounds.fails_shared\n    unknown file: Failure\n    the reason", result.stdout)
        self.assertNotIn("FAILED Rounds.ok", result.stdout)
        self.assertRegex(result.stdout, r"2 passed, +0 skipped, +1 failed")

    def test_what_a_crash_left_out_has_failed(self):
        result = self.play(["ok_shared", "crashes_shared", "after_shared"])
        self.assertEqual(result.returncode, 1)
        self.assertIn("FAILED Rounds.crashes_shared\n    ended with -11", result.stdout)
        self.assertIn("FAILED Rounds.after_shared\n    did not run: its process ended with -11", result.stdout)

    def test_one_that_hangs_ends_with_all_its_processes(self):
        start = time.monotonic()
        result = self.play(["hangs_shared"], "--limit", "1")
        self.assertLess(time.monotonic() - start, 20)
        self.assertEqual(result.returncode, 1)
        self.assertIn("FAILED Rounds.hangs_shared\n    ended after 1 s", result.stdout)
        child = pathlib.Path(f"/proc/{(self.folder / 'child').read_text()}/stat")
        self.assertTrue(not child.exists() or child.read_text().split()[2] == "Z")

    def test_when_time_is_up_the_rest_is_left_out(self):
        result = self.play(["fails_shared", *(f"hangs{i}_shared" for i in range(80)), "Cleanup.GivesTheMemoryBack"],
                           "--time", "2")
        self.assertEqual(result.returncode, 1)
        self.assertRegex(result.stdout, r"2 GPUs +0 passed, +0 skipped, +1 failed, +81 left out")
        self.assertEqual(re.findall(r"FAILED (\S+)", result.stdout), ["Rounds.fails_shared"])

    def test_only_some(self):
        result = self.play(["one_shared", "two_shared"], "--only", "^Rounds.two")
        self.assertIn("1 passed", result.stdout)
        self.assertEqual(list(self.calls), ["Rounds.two_shared"])

    def test_nothing_passed_is_no_success(self):
        self.assertEqual(self.play(["skips_shared"]).returncode, 1)


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1])

"""Puts the program `oncegate` into the wheel, as a script beside the interpreter.

The environment says which: ONCEGATE_BINARY is its path, ONCEGATE_WHEEL_PLATFORM the platform that it runs on, for
example manylinux_2_34_x86_64, and ONCEGATE_NOTICES a file with the licences of what it contains. Without
ONCEGATE_BINARY, as when it is installed from a clone, the wheel is the library alone: the program is the one in PATH.
"""

import os
import pathlib

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class BinaryHook(BuildHookInterface):
    def initialize(self, version, build_data):
        binary = os.environ.get("ONCEGATE_BINARY")
        if not binary or version == "editable":
            return
        platform = os.environ["ONCEGATE_WHEEL_PLATFORM"]
        if not os.access(binary, os.X_OK):
            raise SystemExit(f"ONCEGATE_BINARY is {binary}, which is no program")
        build_data["shared_scripts"][str(pathlib.Path(binary).resolve())] = "oncegate"
        build_data["extra_metadata"][os.environ["ONCEGATE_NOTICES"]] = "THIRD-PARTY-LICENSES.txt"
        build_data["pure_python"] = False
        # No part depends on the version of Python.
        build_data["tag"] = f"py3-none-{platform}"

"use strict";
// The program `oncegate`: it comes in a package for each platform, of which npm installs the one that fits. Without that
// package, as when this one is installed from a clone, it is the one in PATH.
const { accessSync, constants, realpathSync, statSync } = require("node:fs");
const { delimiter, join } = require("node:path");

const NAMES = ["linux-x64", "linux-arm64"];

/** The script of this package that npm puts into PATH under the name of the program. */
const SCRIPT = join(__dirname, "bin", "oncegate.js");

/** The program in PATH, if there is one. */
function inPath() {
  for (const folder of (process.env.PATH ?? "").split(delimiter)) {
    const path = join(folder, "oncegate");
    try {
      accessSync(path, constants.X_OK);
      if (folder !== "" && statSync(path).isFile() && realpathSync(path) !== realpathSync(SCRIPT)) return path;
    } catch {
      // It is not in this folder.
    }
  }
  return null;
}

/** The path of the program. Throws when there is none, with what to do. */
function program() {
  const name = `${process.platform}-${process.arch}`;
  try {
    return require.resolve(`oncegate-${name}/oncegate`);
  } catch {
    const path = inPath();
    if (path !== null) return path;
    if (!NAMES.includes(name)) {
      throw new Error(`oncegate has no program for ${name}, only for ${NAMES.join(" and ")}; put one of your own into PATH`);
    }
    throw new Error(
      `the package oncegate-${name} is not installed, and no oncegate is in PATH; install oncegate without --omit=optional`,
    );
  }
}

module.exports = { program };

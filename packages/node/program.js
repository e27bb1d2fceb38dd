"use strict";
// The program `oncegate`: it comes in a package for each platform, of which npm installs the one that fits.

const NAMES = ["linux-x64", "linux-arm64"];

/** The path of the program. Throws when there is none for this platform, with what to do instead. */
function program() {
  const name = `${process.platform}-${process.arch}`;
  if (!NAMES.includes(name)) {
    throw new Error(`oncegate has no program for ${name}; it has one for ${NAMES.join(" and ")}`);
  }
  try {
    return require.resolve(`oncegate-${name}/oncegate`);
  } catch {
    throw new Error(`the package oncegate-${name} is not installed; install oncegate without --omit=optional`);
  }
}

module.exports = { program };

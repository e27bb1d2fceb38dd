#!/usr/bin/env node
"use strict";
// Starts the program `oncegate`, and ends as it ends. A service should start the program itself, whose path is
// printed by: node -p "require('oncegate').program()"
const { spawn } = require("node:child_process");
const { constants } = require("node:os");
const { program } = require("../program.js");

// The program's own exit code for a failure that is a mistake of the installation.
const CONFIGURATION = 78;

let path;
try {
  path = program();
} catch (error) {
  console.error(`error: ${error.message}`);
  process.exit(CONFIGURATION);
}
// Before the program starts, so that none is missed. A terminal sends these to the program, too, and a second one would
// end it without waiting.
for (const signal of ["SIGINT", "SIGHUP", "SIGQUIT"]) process.on(signal, () => {});
let child;
process.on("SIGTERM", () => child?.kill("SIGTERM"));
child = spawn(path, process.argv.slice(2), { stdio: "inherit" });
child.on("error", (error) => {
  console.error(`error: ${path} cannot be started: ${error.message}`);
  process.exitCode = CONFIGURATION;
});
child.on("exit", (code, signal) => {
  process.exitCode = signal === null ? code : 128 + constants.signals[signal];
});

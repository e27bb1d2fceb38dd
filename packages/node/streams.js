"use strict";
// The protocol's streams: lines of JSON from `oncegate run` and back.
const { writeSync } = require("node:fs");

/** The longest line in either direction, in bytes, as `oncegate run` has it. */
const LINE_MAX_BYTES = 16 * 1024 * 1024;

const LINE_FEED = 0x0a;

/** How long a full pipe is waited for before it is tried again, in milliseconds. */
const FULL_PIPE_WAIT_MS = 5;

/** Waits without the event loop: a line must be whole before another one begins. */
function pause() {
  Atomics.wait(new Int32Array(new SharedArrayBuffer(4)), 0, 0, FULL_PIPE_WAIT_MS);
}

class Streams {
  /** Sends what this process prints to standard error from now on, so that a print does not break the protocol. */
  static takeOver() {
    process.stdout.write = process.stderr.write.bind(process.stderr);
    return new Streams();
  }

  /**
   * The lines, parsed, until the input ends. Only a line feed ends a line; `node:readline` knows more characters that
   * do, and JSON allows some of them in a string.
   */
  async *read() {
    let begun = [];
    for await (let chunk of process.stdin) {
      for (let end; (end = chunk.indexOf(LINE_FEED)) >= 0; chunk = chunk.subarray(end + 1)) {
        yield JSON.parse(Buffer.concat([...begun, chunk.subarray(0, end)]).toString("utf8"));
        begun = [];
      }
      begun.push(chunk);
    }
  }

  /** Writes one line. Throws, before anything is written, when it is no JSON or too long. */
  write(line) {
    const text = Buffer.from(`${JSON.stringify(line)}\n`);
    if (text.length > LINE_MAX_BYTES) {
      throw new RangeError(`its line has ${text.length} bytes, more than ${LINE_MAX_BYTES}`);
    }
    for (let written = 0; written < text.length; ) {
      try {
        written += writeSync(1, text, written);
      } catch (error) {
        if (error.code === "EAGAIN") pause();
        // oncegate has ended or has given this process up; it takes no answer any more.
        else if (error.code === "EPIPE") return;
        else throw error;
      }
    }
  }
}

module.exports = { Streams };

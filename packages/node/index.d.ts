/// <reference types="node" />

/** Where a message comes from. */
export type Origin =
  | { kafka: { topic: string; partition: number; offset: number } }
  | { sqs: { queue: string; id: string } }
  | { other: string };

/** What a message is made of: to build one in a test of a worker. */
export interface MessageFields {
  payload: Buffer | null;
  idempotencyKey?: string;
  attempt?: number;
  recovered?: boolean;
  leaseMs?: number;
  fencingToken?: number | null;
  origin?: Origin | Record<string, never>;
  key?: Buffer | null;
  headers?: ReadonlyArray<readonly [name: string, value: Buffer | null]>;
  headersLeftOut?: number;
  signal?: AbortSignal;
}

/** One delivery of a message. */
export class Message {
  constructor(fields: MessageFields);
  /** The payload, unchanged; `null` for a tombstone, which has no payload at all. */
  readonly payload: Buffer | null;
  /** Is the same in every attempt, and when the message is delivered twice. Pass it to the systems that you call. */
  readonly idempotencyKey: string;
  /** 1, 2, 3 … */
  readonly attempt: number;
  /** Whether an earlier attempt may have had an effect: ask downstream before repeating it, if that is possible. */
  readonly recovered: boolean;
  /** The lease in milliseconds. `oncegate run` extends it while the worker works. */
  readonly leaseMs: number;
  /** The fencing token, with `fenced = true`: a number that only grows per key. */
  readonly fencingToken: number | null;
  readonly origin: Origin | Record<string, never>;
  /** The broker's key of the message. */
  readonly key: Buffer | null;
  /** The headers in their order; names may repeat. */
  readonly headers: ReadonlyArray<readonly [name: string, value: Buffer | null]>;
  /** How many headers were too large to be passed on. */
  readonly headersLeftOut: number;
  /**
   * Is aborted when the outcome no longer matters: another process has taken the message over, its time is up, or
   * `oncegate run` stops. Pass it to `fetch` and the like; a process that does not answer within four seconds is killed.
   */
  readonly signal: AbortSignal;
  /** The payload as text; `""` for a tombstone. */
  text(): string;
  /**
   * The payload as JSON. Numbers are those of JavaScript: whole ones beyond 2^53 lose digits.
   * @throws {DeadLetter} when it is no JSON, because no retry would change that
   */
  json<T = any>(): T;
  /** The value of the last header of this name; `null` when there is none. */
  header(name: string): Buffer | null;
}

/**
 * The message is tried again: after `delayMs` milliseconds, or after the back-off of `oncegate run`. Any other error than
 * `Retry`, `Later` and `DeadLetter` has the same outcome. A retry counts as an attempt.
 */
export class Retry extends Error {
  constructor(reason: string, options?: { delayMs?: number });
  readonly delayMs: number | undefined;
}

/**
 * The message cannot be done yet, and is delivered again after `delayMs` milliseconds, or after the longest back-off of
 * `oncegate run`. It is no failure and counts as no attempt, so nothing but the handler ends it: compare the message's age
 * with a limit of your own.
 */
export class Later extends Error {
  constructor(reason: string, options?: { delayMs?: number });
  readonly delayMs: number | undefined;
}

/** The message is given up: it becomes a dead letter with this reason, and is acknowledged. */
export class DeadLetter extends Error {
  constructor(reason: string, options?: { cause?: unknown });
}

/** Handles one message. What it returns is kept as the result, as JSON; `undefined` and `null` are no result. */
export type Handler = (message: Message) => unknown;

/**
 * What a handler of batches returns: an outcome for each message, in their order, which is a result or an error
 * (`Retry`, `Later`, `DeadLetter` or any other) that means what it means when a `Handler` throws it. It may be a promise
 * of one. Without an array, each message is completed without a result.
 */
export type BatchOutcomes = ReadonlyArray<unknown> | null | undefined | void;

/** Handles a batch. When it throws, every message of the batch is tried again. */
export type BatchHandler = (messages: ReadonlyArray<Message>) => BatchOutcomes | PromiseLike<BatchOutcomes>;

/**
 * Handles messages until standard input ends and each message is answered. From its call on, what the process prints
 * goes to standard error, because standard output belongs to the protocol.
 *
 * `maxInFlight` is how many messages this process handles at a time: 16 unless told otherwise.
 */
export function worker(handler: Handler, options?: { maxInFlight?: number }): Promise<void>;

/**
 * Does the same with a handler that gets many messages in one call, for `oncegate run --batch-messages`. The messages of
 * a batch share one `signal`, which is aborted when each of them is cancelled.
 *
 * `maxInFlight` counts batches. Without `--batch-messages` each message is a batch of one.
 */
export function batchWorker(handler: BatchHandler, options?: { maxInFlight?: number }): Promise<void>;

/**
 * The path of the program `oncegate`, for a service manager to start.
 * @throws {Error} when there is none for this platform
 */
export function program(): string;

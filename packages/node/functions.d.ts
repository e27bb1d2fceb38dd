/// <reference types="node" />
export { DeadLetter, Later, Retry } from "./index";

/** What identifies the work: what is JSON, and neither null nor empty. The order of an object's members does not count. */
export type Key = string | number | ReadonlyArray<unknown> | { readonly [name: string]: unknown };

/** A run of a function under its claim. */
export interface Attempt {
  /** 1, 2, 3 … */
  readonly number: number;
  /** Whether an earlier attempt ended without an outcome: ask downstream whether its effect has happened. */
  readonly recovered: boolean;
  /** A number that only grows for the key, in a scope with `fenced = true`. */
  readonly fencingToken: number | null;
  /** Is aborted when the claim is lost, because another process may have taken over. Pass it to `fetch` and the like. */
  readonly signal: AbortSignal;
}

export interface ClientOptions {
  /** The address of the server; `ONCEGATE_URL` by default. */
  url?: string;
  /** The bearer token; `ONCEGATE_TOKEN` by default. */
  token?: string;
  /** A file with the token, which is read for each request, so the token may be rotated. */
  tokenFile?: string;
  /** The namespace of the keys: one of the scopes that the server gives the token. */
  scope: string;
  /** How long a claim that is not answered is repeated before `Unavailable`: 10 s by default. */
  patienceMs?: number;
  /** How long the outcome of a function is repeated before `OutcomeUnknown`: 5 minutes by default. */
  settleMs?: number;
}

export interface OnceOptions {
  /** The name of the function, a part of the key. */
  function?: string;
  /** The arguments of the work, as JSON: the same key with other ones is a `Mismatch`. */
  arguments?: unknown;
  /** How long to wait for a call that runs elsewhere: as long as it takes by default, and 0 for `Busy` at once. */
  waitMs?: number;
  /** The lease, at most that of the scope, which is the default. */
  leaseMs?: number;
  /** How long the result is kept, at most as long as the scope keeps it, which is the default. */
  retentionMs?: number;
  /** Returns whether no other attempt would change this error; `DeadLetter` always is one. */
  permanent?: (error: unknown) => boolean;
}

/** A client of a server of oncegate. */
export class Client {
  /** @throws {TypeError} when it has no address, token or scope */
  constructor(options: ClientOptions);
  /**
   * Calls `work` once for the key, and returns its result; a later call, in whatever process, gets the first result as
   * JSON has it, and a `Buffer` if it is a `Uint8Array`. An error of `work` is passed on, and the next call tries again.
   * @throws {OnceError} one of the classes below, when there is no result
   */
  once<T>(key: Key, work: (attempt: Attempt) => T | PromiseLike<T>, options?: OnceOptions): Promise<T>;
  /** Waits for what runs, up to `timeoutMs`, and ends the heartbeats. Resolves to whether all has ended. */
  close(timeoutMs?: number): Promise<boolean>;
}

/** Why a call has no result. */
export class OnceError extends Error {}
/** The server or its store did not answer the claim in time: nothing was run. */
export class Unavailable extends OnceError {}
/** The server refuses the request until the token, the scope, the key or a setting is another one. */
export class Refused extends OnceError {}
/** Another call has the key, or its next attempt is not due: nothing was run. */
export class Busy extends OnceError {
  constructor(retryInMs: number);
  readonly retryInMs: number;
}
/** No attempt follows: one has failed for good, or all are used up. */
export class GivenUp extends OnceError {}
/** The key is known with other arguments. */
export class Mismatch extends OnceError {}
/** The claim was lost while the function ran: another process may have taken over. */
export class LeaseLost extends OnceError {}
/** The function has run, and the server did not confirm it in time: call again to learn what is recorded. */
export class OutcomeUnknown extends OnceError {}
/** The work is done, and its result was not kept. */
export class ResultLost extends OnceError {}

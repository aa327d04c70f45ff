/** Questions to the server: one JSON object each, answers whole or line by line; failures are values with a kind. */
import type { Progress } from "./types";

/** Words of the server's own, or "offline" where nobody answered. */
export class ServerError extends Error {
  constructor(
    readonly kind: string,
    readonly status: number,
    message: string,
  ) {
    super(message);
  }
}

/** Whether this page called a question off; nothing is wrong then. */
export function calledOff(error: unknown): boolean {
  return error instanceof DOMException && error.name === "AbortError";
}

export type Line = Record<string, unknown> & { progress?: Progress; done?: boolean };

const PAUSE = 1000; // milliseconds at least, before a question that the server was too busy for is asked again
// Lets the server tell tabs apart.
const client = Array.from(crypto.getRandomValues(new Uint8Array(12)), (x) => x.toString(16).padStart(2, "0")).join("");

type Watcher = (waiting: number) => void;

const watchers = new Set<Watcher>();
let waiting = 0;

/** Calls back with how many questions wait for a busy server, whenever that changes. */
export function watchWaiting(watcher: Watcher): () => void {
  watchers.add(watcher);
  return () => void watchers.delete(watcher);
}

function addWaiting(change: 1 | -1): void {
  waiting += change;
  for (const watcher of watchers) watcher(waiting);
}

async function failureOf(response: Response): Promise<ServerError> {
  try {
    const { error } = (await response.json()) as { error: { kind: string; message: string } };
    return new ServerError(error.kind, response.status, error.message);
  } catch (error) {
    if (calledOff(error)) throw error;
    return new ServerError("failed", response.status, response.statusText);
  }
}

function pause(milliseconds: number, signal?: AbortSignal): Promise<void> {
  return new Promise((resolve, reject) => {
    signal?.throwIfAborted();
    const giveUp = () => {
      clearTimeout(timer);
      reject(signal?.reason);
    };
    const timer = setTimeout(() => {
      signal?.removeEventListener("abort", giveUp);
      resolve();
    }, milliseconds);
    signal?.addEventListener("abort", giveUp);
  });
}

/** As long as the server asks for, and a little longer by chance, so that those who wait do not come back together. */
function pauseAfter(response: Response): number {
  const asked = 1000 * Number(response.headers.get("Retry-After"));
  return Math.max(PAUSE, asked || 0) * (1 + Math.random() / 2);
}

async function reached(address: string, options: RequestInit): Promise<Response> {
  try {
    return await fetch(address, options);
  } catch (error) {
    if (calledOff(error)) throw error;
    throw new ServerError("offline", 0, "");
  }
}

async function asked(route: string, body: object, signal?: AbortSignal): Promise<Response> {
  const options: RequestInit = {
    method: "POST",
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify({ ...body, client }),
    ...(signal ? { signal } : {}),
  };
  let waits = false;
  try {
    // A busy server is asked again until it answers, or until somebody calls the question off.
    for (;;) {
      const response = await reached(`api/${route}`, options);
      if (response.ok) return response;
      const failure = await failureOf(response);
      if (failure.kind !== "busy") throw failure;
      if (!waits) addWaiting(1);
      waits = true;
      await pause(pauseAfter(response), signal);
    }
  } finally {
    if (waits) addWaiting(-1);
  }
}

export async function get<Value>(route: string): Promise<Value> {
  const response = await reached(`api/${route}`, {});
  if (!response.ok) throw await failureOf(response);
  return (await response.json()) as Value;
}

/** One question, one answer. */
export async function ask<Value>(route: string, body: object, signal?: AbortSignal): Promise<Value> {
  const response = await asked(route, body, signal);
  try {
    return (await response.json()) as Value;
  } catch (error) {
    if (calledOff(error)) throw error;
    throw new ServerError("offline", 0, ""); // it went away in the middle of a word
  }
}

/** One question, an answer of many lines; the last is returned. */
export async function follow<Last = Line>(
  route: string,
  body: object,
  onLine: (line: Line) => void,
  signal?: AbortSignal,
): Promise<Last> {
  const response = await asked(route, body, signal);
  let last: Line | null = null;
  for await (const text of linesOf(response)) {
    const line = JSON.parse(text) as Line & { error?: { kind: string; status: number; message: string } };
    if (line.error) throw new ServerError(line.error.kind, line.error.status, line.error.message);
    last = line;
    onLine(line);
  }
  if (!last?.done) throw new ServerError("offline", 0, "");
  return last as Last;
}

async function* linesOf(response: Response): AsyncGenerator<string> {
  const reader = response.body?.pipeThrough(new TextDecoderStream()).getReader();
  if (!reader) return;
  let rest = "";
  for (;;) {
    let part: ReadableStreamReadResult<string>;
    try {
      part = await reader.read();
    } catch (error) {
      if (calledOff(error)) throw error;
      throw new ServerError("offline", 0, "");
    }
    if (part.done) break;
    const lines = (rest + part.value).split("\n");
    rest = lines.pop() ?? "";
    yield* lines.filter(Boolean);
  }
  if (rest) yield rest;
}

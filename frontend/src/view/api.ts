/** Requests to the server: one JSON object each, answered by JSON lines. */
import type { Progress } from "./types";

/** An error of the server, or "offline" if it does not respond. */
export class ServerError extends Error {
  constructor(
    readonly kind: string,
    message = "",
  ) {
    super(message);
  }
}

/** True if this page aborted the request. */
export function isAborted(error: unknown): boolean {
  return error instanceof DOMException && error.name === "AbortError";
}

export type Message = Record<string, unknown> & { progress?: Progress; done?: boolean };

const MIN_PAUSE = 1000; // milliseconds before a request to a busy server is repeated

type PendingListener = (pending: number) => void;

const listeners = new Set<PendingListener>();
let pending = 0;

/** Calls back with the number of requests that wait for a busy server, whenever it changes. */
export function onPendingChange(listener: PendingListener): void {
  listeners.add(listener);
}

function addPending(change: 1 | -1): void {
  pending += change;
  for (const listener of listeners) listener(pending);
}

/** Awaits a step of a request; a lost connection becomes an error of kind "offline". */
async function connected<Value>(step: Promise<Value>): Promise<Value> {
  try {
    return await step;
  } catch (error) {
    throw isAborted(error) ? error : new ServerError("offline");
  }
}

async function errorOf(response: Response): Promise<ServerError> {
  try {
    const { error } = (await response.json()) as { error: { kind: string; message: string } };
    return new ServerError(error.kind, error.message);
  } catch (error) {
    if (isAborted(error)) throw error;
    return new ServerError("failed", response.statusText);
  }
}

function pause(milliseconds: number, signal?: AbortSignal): Promise<void> {
  return new Promise((resolve, reject) => {
    signal?.throwIfAborted();
    const abort = () => {
      clearTimeout(timer);
      reject(signal?.reason);
    };
    const timer = setTimeout(() => {
      signal?.removeEventListener("abort", abort);
      resolve();
    }, milliseconds);
    signal?.addEventListener("abort", abort);
  });
}

/** The time that the server requests, with jitter so that clients do not return at once. */
function pauseAfter(response: Response): number {
  const requested = 1000 * Number(response.headers.get("Retry-After"));
  return Math.max(MIN_PAUSE, requested || 0) * (1 + Math.random() / 2);
}

async function post(route: string, body: object, signal?: AbortSignal): Promise<Response> {
  const options: RequestInit = {
    method: "POST",
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify(body),
    ...(signal ? { signal } : {}),
  };
  let isPending = false;
  try {
    // A request to a busy server is repeated until it is answered or aborted.
    for (;;) {
      const response = await connected(fetch(`api/${route}`, options));
      if (response.ok) return response;
      const error = await errorOf(response);
      if (error.kind !== "busy") throw error;
      if (!isPending) addPending(1);
      isPending = true;
      await pause(pauseAfter(response), signal);
    }
  } finally {
    if (isPending) addPending(-1);
  }
}

export async function get<Value>(route: string): Promise<Value> {
  const response = await connected(fetch(`api/${route}`));
  if (!response.ok) throw await errorOf(response);
  return (await response.json()) as Value;
}

/** Sends a request and returns the last message of the answer; `onMessage` is called with every one. */
export async function request<Last = Message>(
  route: string,
  body: object,
  signal?: AbortSignal,
  onMessage: (message: Message) => void = () => {},
): Promise<Last> {
  const response = await post(route, body, signal);
  let last: Message | null = null;
  for await (const line of linesOf(response)) {
    const message = JSON.parse(line) as Message & { error?: { kind: string; message: string } };
    if (message.error) throw new ServerError(message.error.kind, message.error.message);
    last = message;
    onMessage(message);
  }
  if (!last?.done) throw new ServerError("offline");
  return last as Last;
}

async function* linesOf(response: Response): AsyncGenerator<string> {
  const reader = response.body?.pipeThrough(new TextDecoderStream()).getReader();
  if (!reader) return;
  let rest = "";
  for (;;) {
    const part = await connected(reader.read());
    if (part.done) break;
    const lines = (rest + part.value).split("\n");
    rest = lines.pop() ?? "";
    yield* lines.filter(Boolean);
  }
  if (rest) yield rest;
}

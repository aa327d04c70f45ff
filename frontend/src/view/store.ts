/** State of the viewer's page: the model, its texts, the maps of all heads, and the ablated heads. */
import { createContext } from "preact";
import { useContext, useEffect, useState } from "preact/hooks";
import { unpack, type HeadId, type Packed, type Page, type Unpacked } from "../data";
import { get, isAborted, onPendingChange, request, ServerError, type Message } from "./api";
import { rolesOf, type Roles } from "./roles";
import { headKey, headOf, type Candidate, type Difference, type Precision, type Progress } from "./types";
import type { Slot, State, TokenRow, Trace } from "./types";

const SLOTS: Slot[] = ["A", "B"];
export const RETRY = 2000; // milliseconds between attempts to reach the server

/** The maps of all heads of a text. */
export interface Pictures {
  precision: Precision;
  /** Of each layer, [heads, rows, columns]. */
  layers: Map<number, Unpacked>;
  done: boolean;
}

/** The newest generated token, with its attention in every head. */
interface NewestToken {
  trace: number;
  token: Candidate;
  rows: Omit<TokenRow, "attended">[];
}

export class Store {
  traces: Record<Slot, Trace | null>;
  /** The typed texts; that of a file is reconstructed from its tokens. */
  texts: Record<Slot, string>;
  pictures = new Map<number, Pictures>();
  ablated = new Set<string>();
  /** The effect of the ablated heads on the output of each text. */
  effects: Record<Slot, Difference | null> = { A: null, B: null };
  newest: NewestToken | null = null;
  /** Progress of the texts that are being run. */
  busy = new Map<Slot, Progress | null>();
  /** Number of requests that wait for a busy server. */
  pendingRequests = 0;
  error: { kind: string; message: string } | null = null;
  offline = false;
  /** Number of reconnections; each repeats the requests that were interrupted. */
  reconnects = 0;
  /** Null if the viewer was opened on a model and not on a run. */
  roles: Roles | null = null;

  private listeners = new Set<() => void>();
  private controllers = new Map<string, AbortController>();

  constructor(readonly state: State) {
    this.traces = { ...state.traces };
    this.texts = { A: textOf(state.traces.A), B: textOf(state.traces.B) };
    onPendingChange((count) => {
      this.pendingRequests = count;
      this.notify();
    });
    for (const slot of SLOTS) void this.fetchPictures(slot);
    if (state.run) void this.fetchRoles();
  }

  subscribe(listener: () => void): () => void {
    this.listeners.add(listener);
    return () => void this.listeners.delete(listener);
  }

  private notify(): void {
    for (const listener of this.listeners) listener();
  }

  get loaded(): Trace[] {
    return SLOTS.map((slot) => this.traces[slot]).filter((trace) => trace !== null);
  }

  // ---- texts

  run(slot: Slot, text: string): Promise<void> {
    this.texts[slot] = text;
    const ablated = this.traces[slot]?.ablated.length ? this.ablatedHeads() : [];
    return this.trace(slot, "trace", { slot, text, ablated });
  }

  /** Runs the same tokens again with the ablated heads, so that later layers are affected as well. */
  async rerun(): Promise<void> {
    const ablated = this.ablatedHeads();
    for (const { slot, id } of this.loaded) await this.trace(slot, "retrace", { trace: id, ablated });
  }

  async step(token?: number): Promise<void> {
    const trace = this.traces.A;
    if (trace) await this.trace("A", "step", { trace: trace.id, ...(token === undefined ? {} : { token }) });
  }

  async undo(): Promise<void> {
    const trace = this.traces.A;
    if (trace) await this.trace("A", "undo", { trace: trace.id });
  }

  async close(slot: Slot): Promise<void> {
    await this.exclusive(`run ${slot}`, async (signal) => {
      await request("close", { slot }, signal);
      this.texts[slot] = "";
      this.replace(slot, null);
    });
  }

  stop(): void {
    for (const slot of SLOTS) this.controllers.get(`run ${slot}`)?.abort();
    this.busy.clear();
    this.notify();
  }

  private async trace(slot: Slot, route: string, body: object): Promise<void> {
    this.busy.set(slot, null);
    // Requests about the text that is being replaced would fail.
    for (const name of ["heads", "effect"]) this.controllers.get(`${name} ${slot}`)?.abort();
    this.notify();
    const before = this.traces[slot];
    const isNewest = await this.exclusive(`run ${slot}`, async (signal) => {
      const onMessage = ({ progress }: Message) => {
        if (!progress) return;
        this.busy.set(slot, progress);
        this.notify();
      };
      type Last = { trace: Trace; token?: Candidate; rows?: NewestToken["rows"] };
      const { trace, token, rows = [] } = await request<Last>(route, body, signal, onMessage);
      this.error = null;
      this.newest = token ? { trace: trace.id, token, rows } : null;
      this.replace(slot, trace);
    });
    if (isNewest) {
      this.busy.delete(slot);
      // The text was not replaced: repeat the aborted requests.
      if (before && this.traces[slot] === before) {
        if (!this.pictures.get(before.id)?.done) void this.fetchPictures(slot);
        if (!this.effects[slot]) void this.updateEffects();
      }
    }
    this.notify();
  }

  private replace(slot: Slot, trace: Trace | null): void {
    const before = this.traces[slot];
    if (before) this.pictures.delete(before.id);
    this.traces[slot] = trace;
    this.effects[slot] = null;
    this.notify();
    void this.fetchPictures(slot);
    void this.updateEffects();
  }

  /** Fetches the maps of all heads of a text, layer by layer. */
  private async fetchPictures(slot: Slot): Promise<void> {
    const trace = this.traces[slot];
    if (!trace) return;
    await this.exclusive(`heads ${slot}`, async (signal) => {
      let precision: Precision = { kind: "blocks", exact: true, block: 1, rule: null };
      const layers = new Map<number, Unpacked>();
      await request("heads", { trace: trace.id }, signal, (message) => {
        if (message.precision) precision = message.precision as Precision;
        if (typeof message.layer === "number") layers.set(message.layer, unpack(message.weights as Packed));
        this.pictures.set(trace.id, { precision, layers, done: Boolean(message.done) });
        this.notify();
      });
    });
  }

  // ---- ablated heads

  isAblated(head: HeadId): boolean {
    return this.ablated.has(headKey(head));
  }

  ablatedHeads(): HeadId[] {
    return [...this.ablated].map(headOf);
  }

  toggle(head: HeadId): void {
    const key = headKey(head);
    if (!this.ablated.delete(key)) this.ablated.add(key);
    this.notify();
    void this.updateEffects();
  }

  async restoreAll(): Promise<void> {
    this.ablated.clear();
    this.notify();
    if (this.loaded.some((trace) => trace.ablated.length)) await this.rerun();
    else await this.updateEffects();
  }

  /** The ablated heads that were not ablated when the text was run. */
  newlyAblated(trace: Trace): HeadId[] {
    const already = new Set(trace.ablated.map(headKey));
    return this.ablatedHeads().filter((head) => !already.has(headKey(head)));
  }

  private async updateEffects(): Promise<void> {
    await Promise.all(SLOTS.map((slot) => this.updateEffect(slot)));
    this.notify();
  }

  private async updateEffect(slot: Slot): Promise<void> {
    const trace = this.traces[slot];
    const ablated = trace ? this.newlyAblated(trace) : [];
    this.controllers.get(`effect ${slot}`)?.abort();
    this.effects[slot] = null;
    if (!trace || !ablated.length) return;
    await this.exclusive(`effect ${slot}`, async (signal) => {
      this.effects[slot] = await request<Difference>("effect", { trace: trace.id, ablated }, signal);
    });
  }

  private async fetchRoles(): Promise<void> {
    try {
      this.roles = rolesOf(await get<Page>("run"), this.state);
      this.notify();
    } catch (error) {
      this.fail(error);
    }
  }

  // ---- errors

  fail = (error: unknown): void => {
    if (isAborted(error)) return;
    const kind = error instanceof ServerError ? error.kind : "failed";
    // The server cancels a request whose answer is not read for long, as by a computer that slept.
    if (kind === "offline" || kind === "cancelled") this.waitForServer();
    else if (kind === "gone") this.refresh().catch(this.fail);
    else this.error = { kind, message: error instanceof ServerError ? error.message : String(error) };
    this.notify();
  };

  dismissError(): void {
    this.error = null;
    this.notify();
  }

  private waitForServer(): void {
    if (this.offline) return;
    this.offline = true;
    const reconnect = async () => {
      try {
        await this.refresh();
        this.offline = false;
        this.reconnects++;
        this.notify();
      } catch {
        setTimeout(reconnect, RETRY);
      }
    };
    setTimeout(reconnect, RETRY);
  }

  /** Adopts the texts of the server. */
  private async refresh(): Promise<void> {
    const { traces } = await get<State>("state");
    for (const slot of SLOTS) {
      const known = this.traces[slot];
      if (traces[slot]?.id !== known?.id) this.replace(slot, traces[slot]);
      else if (known && !this.pictures.get(known.id)?.done) void this.fetchPictures(slot);
    }
  }

  /** Runs one task per name at a time, aborting the previous one; returns whether it is still the newest. */
  private async exclusive(name: string, task: (signal: AbortSignal) => Promise<void>): Promise<boolean> {
    this.controllers.get(name)?.abort();
    const controller = new AbortController();
    this.controllers.set(name, controller);
    try {
      await task(controller.signal);
    } catch (error) {
      this.fail(error);
    }
    return this.controllers.get(name) === controller;
  }
}

/** The text of the tokens; gaps between them become spaces. */
function textOf(trace: Trace | null): string {
  if (!trace) return "";
  const { tokens, start, end } = trace.text;
  let text = "";
  let length = 0;
  tokens.forEach((token, i) => {
    const [from, to] = [start[i] ?? -1, end[i] ?? -1];
    if (from < length) return; // special, generated, or another byte of the same character
    text += " ".repeat(from - length) + token;
    length = to;
  });
  return text;
}

export const StoreContext = createContext<Store | null>(null);

/** The store; the component is rendered again when it changes. */
export function useStore(): Store {
  const store = useContext(StoreContext);
  const [, setCount] = useState(0);
  useEffect(() => store?.subscribe(() => setCount((count) => count + 1)), [store]);
  if (!store) throw new Error("a view must be inside StoreContext");
  return store;
}

/** The answer to a request, null until it arrives or without a body; `onError` may replace an error by a value. */
export function useRequest<Value>(
  route: string,
  body: object | null,
  onError: (error: unknown) => Value | null = () => null,
): Value | null {
  const store = useStore();
  const [answer, setAnswer] = useState<{ key: string; value: Value } | null>(null);
  const key = body ? JSON.stringify([route, body, store.reconnects]) : "";
  useEffect(() => {
    if (!body) return;
    const controller = new AbortController();
    request<Value>(route, body, controller.signal)
      .catch((error) => {
        const value = onError(error);
        if (value === null) throw error;
        return value;
      })
      .then((value) => setAnswer({ key, value }))
      .catch(store.fail);
    return () => controller.abort();
  }, [key]);
  return answer?.key === key ? answer.value : null;
}

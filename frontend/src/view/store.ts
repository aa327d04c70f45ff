/** What the page knows: the model, the texts it has read, every head's picture, and which heads are switched off. */
import { createContext } from "preact";
import { useContext, useEffect, useState } from "preact/hooks";
import { unpack, type Packed, type Page, type Unpacked } from "../data";
import { calledOff, follow, get, ServerError, watchWaiting, type Line } from "./api";
import { rolesOf, type Roles } from "./roles";
import { headKey, headOf, type Effect, type HeadAt, type How, type Progress } from "./types";
import type { Candidate, Reading, Slot, State, WordLine } from "./types";

export const SLOTS: Slot[] = ["A", "B"];
const EVERY = 2000; // milliseconds between two looks whether the server is there again

export interface Pictures {
  how: How;
  /** Of each place, [heads, rows, columns]. */
  places: Map<number, Unpacked>;
  done: boolean;
}

export interface Trouble {
  kind: string;
  message: string;
}

/** The newest token that was written, and whom it attends to in every head. */
export interface Written {
  reading: number;
  token: Candidate;
  lines: WordLine[];
}

type Read = { reading: Reading };

export class Store {
  readings: Record<Slot, Reading | null>;
  /** What was typed; a text that came from a file is put together from its tokens. */
  texts: Record<Slot, string>;
  pictures = new Map<number, Pictures>();
  off = new Set<string>();
  effects: Record<Slot, Effect | null> = { A: null, B: null };
  written: Written | null = null;
  /** The texts that are being read, and how far that is. */
  busy = new Map<Slot, Progress | null>();
  /** How many questions the server was too busy for; they are asked again. */
  waitingQuestions = 0;
  trouble: Trouble | null = null;
  offline = false;
  /** How often the server came back: whatever was being fetched then is fetched anew. */
  returns = 0;
  /** Null where the viewer was opened on a model, and not on a run. */
  roles: Roles | null = null;

  private listeners = new Set<() => void>();
  private controllers = new Map<string, AbortController>();

  constructor(readonly state: State) {
    this.readings = { ...state.readings };
    this.texts = { A: textOf(state.readings.A), B: textOf(state.readings.B) };
    watchWaiting((count) => {
      this.waitingQuestions = count;
      this.tell();
    });
    for (const slot of SLOTS) void this.draw(slot);
    if (state.run) void this.fetchRoles();
  }

  subscribe(listener: () => void): () => void {
    this.listeners.add(listener);
    return () => void this.listeners.delete(listener);
  }

  private tell(): void {
    for (const listener of this.listeners) listener();
  }

  // ---- texts

  read(slot: Slot, text: string): Promise<void> {
    this.texts[slot] = text;
    const off = [...this.off].map(headOf);
    const asked = this.readings[slot]?.off.length ? { slot, text, off } : { slot, text };
    return this.readBy(slot, "read", asked);
  }

  /** The same tokens once more, so that every attention is that of the model without the heads that are off. */
  async readAgain(): Promise<void> {
    const off = [...this.off].map(headOf);
    for (const slot of SLOTS) {
      const reading = this.readings[slot];
      if (reading) await this.readBy(slot, "again", { reading: reading.id, off });
    }
  }

  async step(token?: number): Promise<void> {
    const reading = this.readings.A;
    if (reading) await this.readBy("A", "step", { reading: reading.id, ...(token === undefined ? {} : { token }) });
  }

  async back(): Promise<void> {
    const reading = this.readings.A;
    if (reading) await this.readBy("A", "back", { reading: reading.id });
  }

  async close(slot: Slot): Promise<void> {
    await this.guarded(`read ${slot}`, async (signal) => {
      await follow("close", { slot }, () => {}, signal);
      this.texts[slot] = "";
      this.hold(slot, null);
    });
  }

  stop(): void {
    for (const slot of SLOTS) this.controllers.get(`read ${slot}`)?.abort();
    this.busy.clear();
    this.tell();
  }

  private async readBy(slot: Slot, route: string, body: object): Promise<void> {
    this.busy.set(slot, null);
    // What is still asked of the text that goes would be answered that it is gone.
    for (const name of ["heads", "effect"]) this.controllers.get(`${name} ${slot}`)?.abort();
    this.tell();
    const before = this.readings[slot];
    const isNewest = await this.guarded(`read ${slot}`, async (signal) => {
      const onLine = (line: Line) => {
        if (!line.progress) return;
        this.busy.set(slot, line.progress);
        this.tell();
      };
      const last = await follow<Read & { token?: Candidate; rows?: Omit<WordLine, "attended">[] }>(
        route,
        body,
        onLine,
        signal,
      );
      this.trouble = null;
      const lines = (last.rows ?? []).map((row) => ({ ...row, attended: null }));
      this.written = last.token ? { reading: last.reading.id, token: last.token, lines } : null;
      this.hold(slot, last.reading);
    });
    if (isNewest) {
      this.busy.delete(slot);
      // No new text came of it: what was called off is asked again.
      if (before && this.readings[slot] === before) {
        if (!this.pictures.get(before.id)?.done) void this.draw(slot);
        if (!this.effects[slot]) void this.weigh();
      }
    }
    this.tell();
  }

  private hold(slot: Slot, reading: Reading | null): void {
    const before = this.readings[slot];
    if (before) this.pictures.delete(before.id);
    this.readings[slot] = reading;
    this.effects[slot] = null;
    this.tell();
    void this.draw(slot);
    void this.weigh();
  }

  /** Fetches every head's picture of a text, layer by layer. */
  private async draw(slot: Slot): Promise<void> {
    const reading = this.readings[slot];
    if (!reading) return;
    await this.guarded(`heads ${slot}`, async (signal) => {
      const found: Pictures = {
        how: { kind: "blocks", exact: true, block: 1, rule: null },
        places: new Map(),
        done: false,
      };
      const onLine = (line: Line) => {
        if (line.how) found.how = line.how as How;
        if (typeof line.place === "number") found.places.set(line.place, unpack(line.weights as Packed));
        this.pictures.set(reading.id, { ...found, done: Boolean(line.done) });
        this.tell();
      };
      await follow("heads", { reading: reading.id }, onLine, signal);
    });
  }

  // ---- heads that are off

  isOff(head: HeadAt): boolean {
    return this.off.has(headKey(head));
  }

  toggle(head: HeadAt): void {
    const key = headKey(head);
    if (!this.off.delete(key)) this.off.add(key);
    this.tell();
    void this.weigh();
  }

  async reset(): Promise<void> {
    this.off.clear();
    this.tell();
    if (SLOTS.some((slot) => this.readings[slot]?.off.length)) await this.readAgain();
    else await this.weigh();
  }

  /** The heads that are off now, and were not when the text was read. */
  waiting(reading: Reading): HeadAt[] {
    const already = new Set(reading.off.map(headKey));
    return [...this.off].filter((key) => !already.has(key)).map(headOf);
  }

  /** Asks what the output becomes without the heads that are off. */
  private async weigh(): Promise<void> {
    await Promise.all(SLOTS.map((slot) => this.weighIn(slot)));
    this.tell();
  }

  private async weighIn(slot: Slot): Promise<void> {
    const reading = this.readings[slot];
    const off = reading ? this.waiting(reading) : [];
    this.controllers.get(`effect ${slot}`)?.abort();
    this.effects[slot] = null;
    if (!reading || !off.length) return;
    await this.guarded(`effect ${slot}`, async (signal) => {
      this.effects[slot] = await follow<Effect>("effect", { reading: reading.id, off }, () => {}, signal);
    });
  }

  private async fetchRoles(): Promise<void> {
    try {
      this.roles = rolesOf(await get<Page>("run"), this.state);
      this.tell();
    } catch (error) {
      this.fail(error);
    }
  }

  // ---- what goes wrong

  fail(error: unknown): void {
    if (calledOff(error)) return;
    // The server gives up a question whose answer nobody took for long, as of a computer that slept: "superseded".
    const isCutOff = error instanceof ServerError && ["offline", "superseded"].includes(error.kind);
    if (isCutOff) this.waitForServer();
    else if (error instanceof ServerError && error.kind === "gone") this.refresh().catch((again) => this.fail(again));
    else if (error instanceof ServerError) this.trouble = { kind: error.kind, message: error.message };
    else this.trouble = { kind: "failed", message: String(error) };
    this.tell();
  }

  forgive(): void {
    this.trouble = null;
    this.tell();
  }

  private waitForServer(): void {
    if (this.offline) return;
    this.offline = true;
    const look = async () => {
      try {
        await this.refresh();
        this.offline = false;
        this.returns++;
        this.tell();
      } catch {
        setTimeout(look, EVERY);
      }
    };
    setTimeout(look, EVERY);
  }

  /** Takes over what the server holds now. */
  private async refresh(): Promise<void> {
    const state = await get<State>("state");
    for (const slot of SLOTS) {
      if (state.readings[slot]?.id !== this.readings[slot]?.id) this.hold(slot, state.readings[slot]);
      else if (!this.pictures.get(this.readings[slot]?.id ?? -1)?.done) void this.draw(slot);
    }
  }

  /** One question of a name at a time: a newer one calls the older off. Says whether none newer has come. */
  private async guarded(name: string, work: (signal: AbortSignal) => Promise<void>): Promise<boolean> {
    this.controllers.get(name)?.abort();
    const controller = new AbortController();
    this.controllers.set(name, controller);
    try {
      await work(controller.signal);
    } catch (error) {
      this.fail(error);
    }
    return this.controllers.get(name) === controller;
  }
}

/** A text put together from its tokens: what stands between them was white. */
function textOf(reading: Reading | null): string {
  if (!reading) return "";
  const { tokens, start, end } = reading.text;
  let text = "";
  let length = 0;
  tokens.forEach((token, i) => {
    const [from, to] = [start[i] ?? -1, end[i] ?? -1];
    if (from < length) return; // special, generated, or one more byte of the same character
    text += " ".repeat(from - length) + token;
    length = to;
  });
  return text;
}

export const StoreContext = createContext<Store | null>(null);

/** The store; whoever uses it is drawn again when it changes. */
export function useStore(): Store {
  const store = useContext(StoreContext);
  const [, setCount] = useState(0);
  useEffect(() => store?.subscribe(() => setCount((count) => count + 1)), [store]);
  if (!store) throw new Error("a view must stand inside StoreContext");
  return store;
}

// Is the server there, and which model answers? Asked from time to time; after a loss, until it is back.

import { ApiError, get, useKey } from "./api.js";

const CALM = 15000, LOST = 2000; // milliseconds between questions

class Link extends EventTarget {
  status = "connecting"; // ok, loading, draining, failing, offline, locked
  model = null;
  health = null;
  #timer = 0;
  #asking = false;

  start() {
    document.addEventListener("visibilitychange", () => { if (!document.hidden) this.ask(); });
    return this.ask();
  }

  /** Ask now, and again later. */
  async ask() {
    clearTimeout(this.#timer);
    if (this.#asking) return;
    this.#asking = true;
    try {
      this.health = await get("/health");
      const back = this.status !== "ok";
      if (this.health.status === "ok" && (back || !this.model)) await this.#meet();
      this.#become(this.health.status);
    } catch (error) {
      this.#become(error.status === 401 ? "locked" : error.status === 503 ? "failing" : "offline");
    } finally {
      this.#asking = false;
    }
    if (!document.hidden) this.#timer = setTimeout(() => this.ask(), this.status === "ok" ? CALM : LOST);
  }

  /** A request failed: was it the server? */
  heard(error) {
    if (error instanceof ApiError && [0, 401, 503].includes(error.status)) this.ask();
  }

  unlock(key) {
    useKey(key);
    return this.ask();
  }

  async #meet() {
    const { data } = await get("/v1/models");
    this.model = data[0];
    this.dispatchEvent(new Event("model"));
  }

  #become(status) {
    const changed = status !== this.status;
    this.status = status;
    this.dispatchEvent(new Event("health"));
    if (changed) this.dispatchEvent(new Event("status"));
  }
}

export const link = new Link();

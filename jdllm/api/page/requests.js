// The table of requests that wait or run, each with a button that ends its call.

import { request } from "./api.js";
import { duration } from "./chart.js";

export class RequestTable {
  // `body`: a `tbody`; `none`: shown where there is no request; `onError` is told what goes wrong.
  constructor(body, none, onError) {
    Object.assign(this, { body, none, onError });
    this.rows = new Map();
  }

  // Show what GET /v1/requests lists. Rows stay as long as their requests, so that a button keeps the focus.
  show(requests, now) {
    const seen = new Map();
    const rows = new Map();
    for (const one of requests) {
      const sample = seen.get(one.id) ?? 0;
      seen.set(one.id, sample + 1);
      const key = `${one.id} ${sample}`;
      const row = this.rows.get(key) ?? this.row(one.id);
      rows.set(key, row);
      const left = `${one.masked} of ${one.length}`;
      const texts = [one.state, duration(Math.max(0, now - one.created)), one.prompt_tokens, left, one.steps];
      texts.forEach((text, i) => {
        row.cells[i + 1].textContent = text;
      });
    }
    for (const [key, row] of this.rows) if (!rows.has(key)) row.remove();
    this.rows = rows;
    this.none.hidden = rows.size > 0;
  }

  row(call) {
    const row = this.body.insertRow();
    const head = document.createElement("th");
    head.scope = "row";
    head.textContent = call ?? "not over HTTP";
    row.append(head);
    for (let i = 0; i < 5; i += 1) row.insertCell();
    const last = row.insertCell();
    if (call !== null) last.append(this.button(call));
    return row;
  }

  button(call) {
    const button = document.createElement("button");
    button.type = "button";
    button.className = "small";
    button.textContent = "Cancel";
    button.ariaLabel = `Cancel ${call}`;
    button.addEventListener("click", async () => {
      button.disabled = true;
      try {
        await request(`v1/requests/${encodeURIComponent(call)}`, { method: "DELETE" });
      } catch (error) {
        button.disabled = false;
        this.onError(error);
      }
    });
    return button;
  }
}

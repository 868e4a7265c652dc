// A classic script before all others: says so where a part of the page does not load.
"use strict";

window.addEventListener(
  "error",
  ({ target }) => {
    const address = target instanceof Element ? (target.src ?? target.href) : undefined;
    if (address === undefined) return;
    const message = `A part of this page did not load (${new URL(address).pathname}): load the page again.`;
    const show = () => {
      document.getElementById("broken").textContent = message;
    };
    if (document.readyState === "loading") document.addEventListener("DOMContentLoaded", show);
    else show();
  },
  true,
);

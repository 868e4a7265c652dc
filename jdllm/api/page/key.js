// The API key: asked for in a dialog, kept until the tab is closed.

const STORED = "jdllm-api-key";
let asked = null;

export function storedKey() {
  return sessionStorage.getItem(STORED);
}

// Ask for a key; all who ask at the same time share one dialog. False where the user declines.
export function askForKey(message) {
  asked ??= open(message).finally(() => {
    asked = null;
  });
  return asked;
}

function open(message) {
  const dialog = document.getElementById("key-dialog");
  const form = dialog.querySelector("form");
  const input = dialog.querySelector("input");
  dialog.querySelector("[data-message]").textContent = message;
  input.value = "";
  dialog.returnValue = "";
  dialog.showModal();
  return new Promise((resolve) => {
    form.onsubmit = (event) => {
      event.preventDefault();
      sessionStorage.setItem(STORED, input.value.trim());
      input.value = "";
      dialog.close("given");
    };
    dialog.querySelector("[data-decline]").onclick = () => dialog.close();
    dialog.onclose = () => resolve(dialog.returnValue === "given");
  });
}

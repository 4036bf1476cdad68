// Beside what Gradio does: the browser has a name, Esc stops, nothing is sent before the page is ready, what is being
// typed survives sending and a reload, the growing answer is followed, text to copy or edit is the original, the list
// starts closed on a phone.
(() => {
  // All tabs of the browser share it, also those opened at once: requests carry the one that was set last.
  if (!document.cookie.includes("limpet-browser=")) {
    const random = crypto.getRandomValues(new Uint8Array(16));
    const name = Array.from(random, (byte) => byte.toString(16).padStart(2, "0")).join("");
    document.cookie = `limpet-browser=${name}; SameSite=Strict`;
  }

  const JOINER = /\u2060/g;
  const NOTE = /\n<small class="limpet-note">[^<]*<\/small>$/; // the part that view.py puts under an answer
  const clean = (text) => text.replace(NOTE, "").replace(JOINER, "");

  document.addEventListener("keydown", (event) => {
    if (event.key !== "Escape" || event.isComposing) return;
    const stop = document.querySelector("#limpet-box .stop-button");
    if (stop) stop.click();
  });

  // What is sent before the conversations and choices have arrived waits for them.
  const arrived = () => document.querySelector("#limpet-list label.selected") !== null;
  let isWaiting = false;
  const waits = (event) => {
    if (arrived()) return false;
    event.preventDefault();
    event.stopPropagation();
    isWaiting = box().value.trim() !== ""; // else a draft that comes back would be sent
    return true;
  };
  document.addEventListener("click", (event) => {
    if (event.target.closest("#limpet-box .submit-button") && !waits(event)) take(event);
  }, true);

  const DRAFT = "limpet-draft";
  const box = () => document.querySelector("#limpet-box textarea");
  const setText = (field, text) => {
    field.value = text;
    field.dispatchEvent(new Event("input", { bubbles: true }));
  };
  window.addEventListener("pagehide", () => sessionStorage.setItem(DRAFT, box()?.value || sent));
  const waitForArrival = new MutationObserver(() => {
    if (!arrived()) return;
    waitForArrival.disconnect();
    new ResizeObserver(toEnd).observe(conversation());
    if (!box().value) setText(box(), sessionStorage.getItem(DRAFT) ?? "");
    if (isWaiting) document.querySelector("#limpet-box .submit-button").click();
  });
  waitForArrival.observe(document.documentElement, { attributes: true, childList: true, subtree: true });

  // Gradio's own following would not let anybody read further up while an answer comes.
  let follows = true;
  const conversation = () => document.querySelector("#limpet-chat .bubble-wrap");
  const toEnd = () => {
    if (follows && conversation()) conversation().scrollTop = conversation().scrollHeight;
  };
  new MutationObserver(toEnd).observe(document.documentElement, { childList: true, characterData: true, subtree: true });
  document.addEventListener("scroll", ({ target }) => {
    if (target === conversation()) follows = target.scrollHeight - target.scrollTop - target.clientHeight < 2;
  }, true);
  document.addEventListener("click", (event) => {
    if (!event.target.closest("#limpet-box .submit-button, #limpet-list label")) return;
    follows = true;
    toEnd();
  });

  document.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing || event.target !== box() || waits(event)) return;
    follows = true;
    take(event);
  }, true);

  // What is sent leaves the field with the key or click that sends it, for what is typed next is the next message, and
  // Gradio reads the field only later. It comes back if the page's server could not take it; without a connection Gradio
  // says nothing until it loads the page again.
  let sent = "";
  const taken = [];
  const take = (event) => {
    const text = box().value;
    if (!text.trim()) {
      event.preventDefault();
      event.stopPropagation();
      return;
    }
    taken.push(text);
    sent = text;
    setText(box(), "");
  };
  window.limpet = {
    send: (_, ...others) => [taken.shift() ?? "", ...others],
    delivered: () => {
      sent = "";
    },
    refused: () => {
      if (!box().value) setText(box(), sent);
      sent = "";
    },
  };

  // The copy buttons too: away from localhost and without TLS they go through a text area.
  document.addEventListener("copy", (event) => {
    const field = event.target instanceof HTMLTextAreaElement ? event.target : null;
    const copied = field?.value.slice(field.selectionStart, field.selectionEnd) ?? document.getSelection().toString();
    if (copied === clean(copied)) return;
    event.clipboardData.setData("text/plain", clean(copied));
    event.preventDefault();
  });

  document.addEventListener("focusin", ({ target }) => {
    if (!(target instanceof HTMLTextAreaElement && target.closest("#limpet-chat"))) return;
    setText(target, clean(target.value));
  });

  // A closed tab ends its answer at once. The page's own address is the base: a proxy may show it under a path.
  window.addEventListener("pagehide", () => {
    const tab = document.querySelector("[data-tab]")?.dataset.tab;
    if (tab) navigator.sendBeacon(new URL(`limpet/leave/${tab}`, document.baseURI));
  });
  window.addEventListener("pageshow", (event) => {
    if (event.persisted) location.reload();
  });

  const phone = () => window.innerWidth < 768;
  const closeList = () => {
    document.querySelector(".sidebar.open .toggle-button")?.click();
  };
  document.addEventListener("click", (event) => {
    if (phone() && event.target.closest("#limpet-new, #limpet-list label")) closeList();
    else if (event.target.closest("#limpet-new")) box().focus();
  });
  // Gradio opens the list while it builds the page: let it finish first.
  const waitForList = new MutationObserver(() => {
    if (!document.querySelector(".sidebar.open")) return;
    waitForList.disconnect();
    if (phone()) setTimeout(closeList, 250);
  });
  waitForList.observe(document.documentElement, { childList: true, subtree: true });

  if (navigator.clipboard) {
    const writeText = navigator.clipboard.writeText.bind(navigator.clipboard);
    navigator.clipboard.writeText = (text) => writeText(clean(text));
  }
})();

// Beside what Gradio does: Esc stops, Enter asks once, copied text is clean, the list starts closed on a phone.
(() => {
  const JOINER = /\u2060/g;
  const NOTE = /\n*<small class="limpet-note">[^<]*<\/small>/g;
  const clean = (text) => text.replace(NOTE, "").replace(JOINER, "");

  document.addEventListener("keydown", (event) => {
    if (event.key !== "Escape" || event.isComposing) return;
    const stop = document.querySelector("#limpet-box .stop-button");
    if (stop) stop.click();
  });

  // The text field is emptied when the server has answered: until then a second Enter would ask the same again.
  const SAME_ENTER_MS = 600;
  let sentAt = -Infinity;
  const isBox = (element) => element instanceof HTMLTextAreaElement && element.closest("#limpet-box");
  document.addEventListener("input", (event) => {
    if (isBox(event.target)) sentAt = -Infinity;
  }, true);
  document.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing || !isBox(event.target)) return;
    if (event.timeStamp - sentAt < SAME_ENTER_MS) {
      event.preventDefault();
      event.stopPropagation();
    } else {
      sentAt = event.timeStamp;
    }
  }, true);

  document.addEventListener("copy", (event) => {
    if (event.target instanceof HTMLTextAreaElement || event.target instanceof HTMLInputElement) return;
    const selected = document.getSelection();
    if (!selected || !selected.toString().includes("\u2060")) return;
    event.clipboardData.setData("text/plain", clean(selected.toString()));
    event.preventDefault();
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

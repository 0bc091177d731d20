// Keeps the page up to date: asks for it again when the server has read the database again, and changes what differs.
// Without this script the page is the same; it is then up to date when it is loaded.
"use strict";
(() => {
  const PATIENCE = 4000;
  let etag = null;
  let answered = Date.now();
  let leaving = 0;

  // Makes a node like another, and keeps every element that stays: a button that is pressed, a field with the focus.
  function change(old, made) {
    if (old.nodeType !== made.nodeType || old.nodeName !== made.nodeName) return old.replaceWith(made.cloneNode(true));
    if (old.nodeType === Node.TEXT_NODE) {
      if (old.data !== made.data) old.data = made.data;
      return undefined;
    }
    if (old.nodeType !== Node.ELEMENT_NODE) return undefined;
    for (const { name } of [...old.attributes]) if (!made.hasAttribute(name)) old.removeAttribute(name);
    for (const { name, value } of made.attributes) if (old.getAttribute(name) !== value) old.setAttribute(name, value);
    if (old.nodeName === "INPUT") return undefined;
    const before = [...old.childNodes];
    const after = [...made.childNodes];
    before.slice(after.length).forEach((child) => child.remove());
    after.forEach((child, index) => (index < before.length ? change(before[index], child) : old.append(child.cloneNode(true))));
    return undefined;
  }

  function show(text) {
    const made = new DOMParser().parseFromString(text, "text/html");
    if (!made.body.dataset.asOf) return false;
    if (made.body.dataset.asOf < document.body.dataset.asOf) return true; // another worker, which has read earlier
    document.body.dataset.asOf = made.body.dataset.asOf;
    document.body.classList.toggle("stale", made.body.classList.contains("stale"));
    for (const id of ["freshness", "main"]) change(document.getElementById(id), made.getElementById(id));
    return true;
  }

  function lost(isLost) {
    document.body.classList.toggle("lost", isLost);
    document.getElementById("lost").hidden = !isLost;
  }

  async function ask() {
    let next = 1000;
    try {
      const headers = etag ? { "If-None-Match": etag } : {};
      const response = await fetch(location.href, { headers, cache: "no-store", signal: AbortSignal.timeout(PATIENCE) });
      const good = response.status === 304 || (response.ok && show(await response.text()));
      if (good) {
        answered = Date.now();
        etag = response.headers.get("ETag");
        next = Number(response.headers.get("Tenure-Next") || next);
      }
    } catch {
      // It is asked again below, and the page says so if that goes on.
    }
    lost(Date.now() - answered > PATIENCE);
    setTimeout(again, Math.max(next, 50) + 25);
  }

  function again() {
    // A form that was sent leads to another page. If it does not, this page goes on after a while.
    const stays = leaving + PATIENCE - Date.now();
    if (stays > 0) setTimeout(again, stays);
    else if (document.hidden) document.addEventListener("visibilitychange", again, { once: true });
    else ask();
  }

  addEventListener("submit", () => (leaving = Date.now()));
  setTimeout(again, 250);
})();

// The dashboard in the browser: pages that stay current, times, keys, questions before changes, light and dark.
//
// Every page and every form works without this file. `morph` is exported for its tests.

const body = document.body;

// -- morphing: make what is shown equal to what came, and keep what the reader is doing

function same(one, other) {
  return one.nodeType === other.nodeType && one.nodeName === other.nodeName && id(one) === id(other) && key(one) === key(other);
}

// Not the property: in a form it is the field of that name.
function id(node) {
  return node.nodeType === Node.ELEMENT_NODE ? node.getAttribute("id") || "" : "";
}

function key(node) {
  return node.nodeType === Node.ELEMENT_NODE ? node.getAttribute("data-row") || "" : "";
}

function attributes(from, to) {
  for (const { name } of [...from.attributes]) {
    // What the reader opened stays open.
    if (!to.hasAttribute(name) && name !== "open" && name !== "data-kept") from.removeAttribute(name);
  }
  for (const { name, value } of to.attributes) {
    if (from.getAttribute(name) !== value) from.setAttribute(name, value);
  }
}

export function morph(from, to) {
  const rows = new Map();
  for (const child of from.children) if (key(child)) rows.set(key(child), child);
  let place = from.firstChild;
  for (const wanted of [...to.childNodes]) {
    const element = wanted.nodeType === Node.ELEMENT_NODE;
    while (element && place && place.nodeType !== Node.ELEMENT_NODE) place = removed(place);
    const found = key(wanted) ? rows.get(key(wanted)) : element ? next(place, wanted) : place && same(place, wanted) ? place : null;
    if (!found || !same(found, wanted)) {
      from.insertBefore(wanted.cloneNode(true), place);
      continue;
    }
    if (found === place) place = place.nextSibling;
    else from.insertBefore(found, place);
    if (!element) {
      if (found.nodeValue !== wanted.nodeValue) found.nodeValue = wanted.nodeValue;
    } else if (!found.isEqualNode(wanted) && !kept(found)) {
      const current = found.classList.contains("current");
      attributes(found, wanted);
      if (current) found.classList.add("current");
      morph(found, wanted);
    }
  }
  while (place) place = removed(place);
}

// The next element without a key that can become the wanted one.
function next(place, wanted) {
  for (let at = place; at; at = at.nextSibling) if (same(at, wanted)) return at;
  return null;
}

function removed(node) {
  const following = node.nextSibling;
  if (node.nodeType === Node.ELEMENT_NODE && node.contains(document.activeElement)) document.getElementById("content")?.focus();
  node.remove();
  return following;
}

// A field that the reader has changed, and a form with such a field, stay as they are.
function kept(element) {
  if (element === document.activeElement && element.matches("input, select, textarea")) return true;
  if (element.matches("textarea")) return element.value !== element.defaultValue;
  if (element.matches("input[type=checkbox]")) return element.checked !== element.defaultChecked;
  if (element.matches("input")) return element.value !== element.defaultValue;
  if (element.matches("select")) return [...element.options].some((option) => option.selected !== option.defaultSelected);
  return element.hasAttribute("data-kept");
}

// -- live pages

function connection(text) {
  const banner = document.getElementById("connection");
  banner.textContent = text;
  banner.hidden = !text;
}

function live() {
  const main = document.getElementById("content");
  let source = null;
  const open = () => {
    const query = new URLSearchParams({ page: body.dataset.page, seen: main.dataset.version });
    source = new EventSource(`${body.dataset.base}live?${query}`);
    source.addEventListener("page", (event) => {
      const { html, version } = JSON.parse(event.data);
      const wanted = document.createElement("main");
      wanted.innerHTML = html;
      times(wanted);
      morph(main, wanted);
      main.dataset.version = version;
      selection();
      connection("");
    });
    source.addEventListener("read", (event) => {
      // The same was read again: only the time of that is another one.
      for (const time of main.querySelectorAll("[data-read] time")) time.dateTime = JSON.parse(event.data).at;
      times(main);
      connection("");
    });
    source.addEventListener("problem", (event) => connection(`${JSON.parse(event.data).title}. What is shown is old; this page looks again.`));
    source.addEventListener("gone", () => location.reload());
    source.onopen = () => { lost = 0; };
    source.onerror = () => {
      // A stream that ends in order is opened again at once; only one that cannot be opened says something to the reader.
      lost += 1;
      if (lost > 2) connection("The server does not answer. What is shown is old; this page looks again.");
      if (source.readyState === EventSource.CLOSED) setTimeout(reopen, 2000);
    };
  };
  let lost = 0;
  const reopen = async () => {
    source?.close();
    open();
  };
  open();
  document.addEventListener("visibilitychange", () => {
    if (document.hidden) source?.close();
    else reopen();
  });
  addEventListener("pagehide", () => source?.close());
}

// -- times

function ago(moment, now) {
  const seconds = Math.round((now - moment) / 1000);
  const size = Math.abs(seconds);
  const [number, unit] = size < 60 ? [size, "s"] : size < 3600 ? [Math.floor(size / 60), "min"] : size < 172800 ? [Math.floor(size / 3600), "h"] : [Math.floor(size / 86400), "d"];
  return seconds >= 0 ? `${number} ${unit} ago` : `in ${number} ${unit}`;
}

function times(root) {
  const now = Date.now();
  for (const time of root.querySelectorAll("time[datetime]")) {
    const moment = new Date(time.dateTime);
    const text = ago(moment, now);
    if (time.textContent !== text) time.textContent = text;
    const title = moment.toLocaleString(undefined, { dateStyle: "medium", timeStyle: "long" });
    if (time.title !== title) time.title = title;
  }
}

// -- selecting rows

function selection() {
  for (const form of document.querySelectorAll("form[data-select]")) {
    const boxes = [...document.querySelectorAll(`input[type=checkbox][form="${id(form)}"][name]`)];
    const chosen = boxes.filter((box) => box.checked).length;
    for (const count of form.querySelectorAll("[data-count]")) count.textContent = chosen;
    for (const button of form.querySelectorAll("button[data-needs-selection]")) button.disabled = chosen === 0;
    const all = document.querySelector(`input[data-all="${id(form)}"]`);
    if (all) {
      all.checked = boxes.length > 0 && chosen === boxes.length;
      all.indeterminate = chosen > 0 && chosen < boxes.length;
    }
  }
}

document.addEventListener("change", (event) => {
  const all = event.target.closest?.("input[data-all]");
  if (all) for (const box of document.querySelectorAll(`input[type=checkbox][form="${all.dataset.all}"][name]`)) box.checked = all.checked;
  selection();
});

// -- questions before changes

document.addEventListener("submit", (event) => {
  const question = event.submitter?.dataset.confirm || event.target.dataset.confirm;
  if (question && !confirm(question)) event.preventDefault();
});

// -- keys

let pending = "";

function rows() {
  return [...document.querySelectorAll("main tr[data-row]")];
}

function move(step) {
  const all = rows();
  if (!all.length) return;
  const at = all.findIndex((row) => row.classList.contains("current"));
  all[at]?.classList.remove("current");
  const next = all[Math.min(Math.max(at + step, 0), all.length - 1)];
  next.classList.add("current");
  next.scrollIntoView({ block: "nearest" });
}

document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || event.target.closest("input, select, textarea, dialog[open]")) return;
  const current = document.querySelector("main tr.current");
  if (pending === "g") {
    pending = "";
    const link = document.querySelector(`nav a[data-key="${CSS.escape(event.key)}"]`);
    if (link) { event.preventDefault(); link.click(); }
    return;
  }
  if (event.key === "g") pending = "g";
  else if (event.key === "/") { event.preventDefault(); document.querySelector("main input:not([type=hidden]), main select")?.focus(); }
  else if (event.key === "j") move(1);
  else if (event.key === "k") move(-1);
  else if (event.key === "x") { current?.querySelector("input[type=checkbox]")?.click(); }
  else if (event.key === "Enter" && event.target === body) { current?.querySelector("a[href]")?.click(); }
  else if (event.key === "?") document.getElementById("keys").showModal();
});

// -- light and dark

document.getElementById("theme")?.addEventListener("click", () => {
  const root = document.documentElement;
  const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.theme = dark ? "light" : "dark";
  const path = new URL(body.dataset.base, location.href).pathname;
  document.cookie = `penstock_theme=${root.dataset.theme}; Path=${path}; Max-Age=31536000; SameSite=Lax`;
});

times(document);
setInterval(() => times(document), 1000);
selection();
if ("live" in body.dataset) live();
if ("retry" in body.dataset) setTimeout(() => location.reload(), 3000);

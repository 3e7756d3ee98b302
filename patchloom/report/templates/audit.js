"use strict";
// The page of `patchloom audit`: decisions per image, kept in this browser, saved as a corrections file.
const {classes, items, earlier, storage} = JSON.parse(document.getElementById("described").textContent);
const HEAD = "path,action,label";
const cards = [...document.querySelectorAll(".item[data-item]")];
const cardsOf = new Map();
for (const card of cards) cardsOf.set(card.dataset.item, [...(cardsOf.get(card.dataset.item) || []), card]);
const decisions = new Map();  // number of an item → {action, label}
const history = [];  // [number, decision before]

function remember() {
  try { localStorage.setItem(storage, JSON.stringify([...decisions])); } catch { /* a browser that keeps nothing */ }
}

function recall() {
  try {
    for (const [number, one] of JSON.parse(localStorage.getItem(storage) || "[]")) {
      const valid = items[number] && ["keep", "relabel", "drop"].includes(one.action);
      if (valid && (one.action !== "relabel" || classes.includes(one.label))) decisions.set(number, one);
    }
  } catch { /* nothing is kept, or not by this page */ }
}

function show(number) {
  const decision = decisions.get(number);
  for (const card of cardsOf.get(String(number)) || []) {
    if (decision) card.dataset.action = decision.action; else delete card.dataset.action;
    for (const button of card.querySelectorAll("[data-set]"))
      button.setAttribute("aria-pressed", String(decision?.action === button.dataset.set));
    if (decision?.action === "relabel") choose(card.querySelector("select"), decision.label);
  }
}

function choose(select, label) {
  if (![...select.options].some(option => option.value === label)) select.add(new Option(label, label));
  select.value = label;
}

function fill(select) {  // the whole list of classes only where it is opened: pages have hundreds of lists
  if (select.options.length >= classes.length) return;
  const chosen = select.value;
  select.replaceChildren(...classes.map(name => new Option(name, name)));
  select.value = chosen;
}

function decide(number, decision) {
  history.push([number, decisions.get(number)]);
  if (decision) decisions.set(number, decision); else decisions.delete(number);
  show(number);
  summarize();
}

function act(card, action) {
  const number = Number(card.dataset.item), before = decisions.get(number);
  const label = action === "relabel" ? card.querySelector("select").value : "";
  const same = before?.action === action && before.label === label;
  decide(number, same ? undefined : {action, label});
}

function undo() {
  const last = history.pop();
  if (!last) return;
  const [number, before] = last;
  if (before) decisions.set(number, before); else decisions.delete(number);
  show(number);
  summarize();
  cardsOf.get(String(number))?.[0].focus();
}

function quoted(cell) {
  return /[",\r\n]|^\s|\s$/.test(cell) ? `"${cell.replaceAll('"', '""')}"` : cell;
}

function csv() {
  const decided = new Map(earlier.map(([path, action, label]) => [path, [path, action, label]]));
  for (const [number, {action, label}] of [...decisions].sort((a, b) => a[0] - b[0]))
    decided.set(items[number].path, [items[number].path, action, label]);
  return [HEAD, ...[...decided.values()].map(row => row.map(quoted).join(","))].join("\n") + "\n";
}

function summarize() {
  const counts = {relabel: 0, drop: 0, keep: 0};
  for (const {action} of decisions.values()) counts[action]++;
  const open = cardsOf.size - decisions.size;
  const before = earlier.length ? ` · ${earlier.length} from before` : "";
  document.getElementById("counts").textContent =
    `${counts.relabel} relabel · ${counts.drop} drop · ${counts.keep} keep · ${open} undecided${before}`;
  document.getElementById("csv").value = csv();
  remember();
}

function save() {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([csv()], {type: "text/csv"}));
  link.download = "corrections.csv";
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
}

function move(step) {
  const at = cards.indexOf(document.activeElement?.closest(".item"));
  cards[Math.min(cards.length - 1, Math.max(0, at + step))]?.focus();
}

document.addEventListener("click", event => {
  const button = event.target.closest("[data-set]");
  if (button) act(button.closest(".item"), button.dataset.set);
});
document.addEventListener("focusin", event => { if (event.target.matches(".item select")) fill(event.target); });
document.addEventListener("change", event => {
  if (!event.target.matches(".item select")) return;
  const number = Number(event.target.closest(".item").dataset.item);
  decide(number, {action: "relabel", label: event.target.value});
});
document.addEventListener("keydown", event => {
  if (event.ctrlKey || event.metaKey || event.altKey || event.target.matches("select, textarea")) return;
  const card = document.activeElement?.closest(".item[data-item]");
  const action = {k: "keep", r: "relabel", d: "drop"}[event.key];
  if (event.key === "ArrowRight") move(1);
  else if (event.key === "ArrowLeft") move(-1);
  else if (event.key === "u") undo();
  else if (action && card) { act(card, action); move(1); }
  else return;
  event.preventDefault();
});
document.getElementById("save").addEventListener("click", save);
document.getElementById("suggested").addEventListener("click", () => {
  items.forEach((item, number) => {
    if (item.suggestion && !decisions.has(number)) decide(number, {action: "relabel", label: item.suggestion});
  });
});
for (const card of cards) choose(card.querySelector("select"), items[Number(card.dataset.item)].choice);
recall();
for (const number of decisions.keys()) show(number);
summarize();

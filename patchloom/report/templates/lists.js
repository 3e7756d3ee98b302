"use strict";
// Sort and filter lists (data-list) and long tables (data-table) of a page; without scripts they stay as written.
const LONG = 30;  // rows of a table from which on it has a filter

function made(tag, attributes, ...inside) {
  const element = Object.assign(document.createElement(tag), attributes);
  element.append(...inside);
  return element;
}

function addFilter(controls, items, word) {
  const count = made("output", {className: "muted"});
  const input = made("input", {type: "search", autocomplete: "off"});
  const texts = items.map(item => `${item.textContent} ${item.title}`.toLowerCase());
  function filter() {
    const words = input.value.toLowerCase().split(/\s+/).filter(Boolean);
    let left = 0;
    items.forEach((item, place) => {
      item.hidden = !words.every(one => texts[place].includes(one));
      left += !item.hidden;
    });
    count.textContent = left < items.length ? `${left} of ${items.length} ${word}` : `${items.length} ${word}`;
  }
  input.addEventListener("input", filter);
  controls.append(made("label", {}, "Filter ", input), count);
  filter();
}

function ordered(values, step) {  // numbers by size, text by the alphabet
  const numbers = values.map(value => parseFloat(value.replace(/,(?=\d{3})/g, "").replace("−", "-")));
  const numeric = numbers.every((number, place) => !Number.isNaN(number) || /^[–\s]*$/.test(values[place]));
  const text = new Intl.Collator(undefined, {numeric: true});
  return values.map((_, place) => place).sort((a, b) => {
    if (!numeric) return step * text.compare(values[a], values[b]);
    return Number.isNaN(numbers[a]) - Number.isNaN(numbers[b]) || step * (numbers[a] - numbers[b]);
  });
}

for (const list of document.querySelectorAll("[data-list]")) {
  const items = [...list.children], controls = made("div", {className: "controls"});
  const keys = Object.entries(JSON.parse(list.dataset.keys));
  const select = made("select", {}, ...keys.map(([key, name]) => new Option(name, key)));
  select.addEventListener("change", () => {
    const values = items.map(item => item.dataset[select.value]);
    const order = ordered(values, select.selectedIndex ? 1 : -1);  // the first key is the one that falls
    list.append(...order.map(place => items[place]));
  });
  controls.append(made("label", {}, "Sort by ", select));
  addFilter(controls, items, list.dataset.list);
  list.before(controls);
}

for (const table of document.querySelectorAll("[data-table]")) {
  const rows = [...table.tBodies[0].rows], heads = [...table.tHead.rows[0].cells];
  heads.forEach((head, column) => {
    const button = made("button", {type: "button"}, ...head.childNodes);
    button.addEventListener("click", () => {
      const step = head.ariaSort === "ascending" ? -1 : 1;
      for (const other of heads) other.removeAttribute("aria-sort");
      head.setAttribute("aria-sort", step > 0 ? "ascending" : "descending");
      const order = ordered(rows.map(row => row.cells[column].textContent.trim()), step);
      table.tBodies[0].append(...order.map(place => rows[place]));
    });
    head.append(button);
  });
  if (rows.length < LONG) continue;
  const controls = made("div", {className: "controls"});
  addFilter(controls, rows, table.dataset.table);
  table.closest(".wide").before(controls);
}

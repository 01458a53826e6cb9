// The colour theme and the search. All pages can be read without this script.
"use strict";

// A page that is opened from a file may have no storage. Then a choice lasts as long as the page.
function remember(theme) {
  try {
    if (theme) localStorage.setItem("theme", theme);
    return localStorage.getItem("theme");
  } catch (error) {
    return theme;
  }
}

const root = document.documentElement;
// Set the theme before the body is drawn, because otherwise a dark page would flash.
if (remember()) root.dataset.theme = remember();

// The index is large, so a page loads it when somebody begins to search.
function load() {
  if (document.getElementById("book-index")) return;
  const script = document.createElement("script");
  script.id = "book-index";
  script.src = "search.js";
  script.onload = () => show(document.getElementById("book-search").value);
  document.head.append(script);
}

// Whether a word of the text begins like this one.
function has(text, word) {
  for (let at = text.indexOf(word); at >= 0; at = text.indexOf(word, at + 1)) {
    if (!at || !/[a-z0-9]/.test(text[at - 1])) return true;
  }
  return false;
}

// Find what has all words. Hits in titles come before hits in texts, the path before other pages,
// and titles that begin with the first word before others. Tests and the book's own source are last.
function search(question) {
  const words = question.toLowerCase().split(/\s+/).filter(Boolean);
  const all = (text) => words.every((word) => has(text.toLowerCase(), word));
  const place = ([title, , page, rank]) =>
    4 * rank + 10 * !all(`${title} ${page}`) + 40 * (rank === 4)
    + !title.toLowerCase().startsWith(words[0]);
  const hits = window.INDEX.filter(([title, , page, , more]) => all(`${title} ${page} ${more}`));
  return words.length ? hits.sort((a, b) => place(a) - place(b)).slice(0, 30) : [];
}

function nothing() {
  const item = document.createElement("li");
  item.textContent = "nothing found";
  return item;
}

function hide() {
  const list = document.getElementById("book-found");
  list.hidden = true;
  list.replaceChildren();
}

function show(question) {
  if (!question.trim() || !window.INDEX) {
    hide();
    return;
  }
  const list = document.getElementById("book-found");
  const items = search(question).map(([title, address, page]) => {
    const item = document.createElement("li"), link = document.createElement("a");
    const where = document.createElement("small");
    link.href = address;
    link.textContent = title;
    where.textContent = page;
    link.append(where);
    item.append(link);
    return item;
  });
  list.hidden = false;
  list.replaceChildren(...(items.length ? items : [nothing()]));
  list.scrollTop = 0;
}

// The arrow keys move from the field through the results, and back.
function move(event) {
  const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
  const stops = [...document.querySelectorAll("#book-search, #book-found a")];
  const next = stops[stops.indexOf(document.activeElement) + step];
  if (!step || stops.length < 2) return;
  event.preventDefault();
  if (next) next.focus();
}

// A link into a folded part opens it.
function unfold() {
  const id = decodeURIComponent(location.hash.slice(1));
  const target = id && document.getElementById(id);
  let part = target && target.closest("details:not([open])");
  if (!part) return;
  for (; part; part = part.parentElement.closest("details:not([open])")) part.open = true;
  target.scrollIntoView();
}

addEventListener("hashchange", unfold);
document.addEventListener("DOMContentLoaded", () => {
  unfold();
  // In a long sidebar the current page may be far below.
  const here = document.querySelector(".side [aria-current]"), side = here && here.closest(".side");
  if (side) side.scrollTop = here.offsetTop - side.clientHeight / 2;
  const field = document.getElementById("book-search"), menus = [...document.querySelectorAll(".menu")];
  document.getElementById("book-theme").addEventListener("click", () => {
    const dark = root.dataset.theme
      ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
    root.dataset.theme = dark ? "light" : "dark";
    remember(root.dataset.theme);
  });
  field.addEventListener("focus", load);
  field.addEventListener("input", () => show(field.value));
  field.closest(".search").addEventListener("keydown", move);
  field.addEventListener("keydown", (event) => {
    const hit = document.querySelector("#book-found a");
    if (event.key === "Enter" && hit) hit.click();
  });
  // A click elsewhere closes a menu.
  document.addEventListener("click", (event) => {
    for (const menu of menus) {
      if (!menu.contains(event.target) || event.target.closest("nav a")) menu.open = false;
    }
    if (!event.target.closest(".search input")) hide();
  });
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape") {
      menus.forEach((menu) => { menu.open = false; });
      // The focus would be lost with its result.
      if (event.target.closest("#book-found")) field.focus();
      hide();
    } else if (event.key === "/" && !event.target.closest("input, textarea")) {
      event.preventDefault();
      field.focus();
    }
  });
});

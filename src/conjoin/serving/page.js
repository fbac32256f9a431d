"use strict";
// What is asked stands in the address, but for pictures, which stand in the entry of the browser's history.

const $ = id => document.getElementById(id);
const SORTED = 100, SHORTEST = 8, LARGEST = 1600, SEVERAL = 1_500_000;
const KINDS = { image: "Picture alone", text: "Text alone", both: "Picture and text" };
const SIGNS = { $: "USD", US$: "USD", "€": "EUR", "£": "GBP", "¥": "JPY", "₹": "INR", "zł": "PLN", kr: "SEK" };
const number = value => new Intl.NumberFormat(undefined, { maximumFractionDigits: 2 }).format(value);

let settings, state, pictures = [], asking = null, sought = {};

/** An element with attributes, handlers and children. */
function h(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (typeof value === "boolean") element[name] = value;
    else if (value != null) element.setAttribute(name, value);
  }
  element.append(...children.flat().filter(child => child != null && child !== false));
  return element;
}

// ---- The state and its address

const SETTINGS = ["where", "ranking", "image", "text", "least"];
const PLAIN = ["q", "like", "part", "kind", "sort", ...SETTINGS];

function readState() {
  const given = new URLSearchParams(location.search), read = { filters: {}, page: 1 };
  for (const name of PLAIN) read[name] = given.get(name) ?? "";
  read.page = Math.max(1, parseInt(given.get("page")) || 1);
  read.details = given.has("details");
  for (const [name, value] of given) {
    const [, how, column] = /^(is|from|to)\.(.+)$/.exec(name) ?? [];
    if (how === "is") (read.filters[column] ??= []).push(value);
    else if (how) (read.filters[column] ??= {})[how === "from" ? "least" : "most"] = Number(value);
  }
  pictures = history.state?.pictures ?? [];
  return read;
}

/** The address of the state with changes, which lead to the first page. */
function address(changes = {}) {
  const to = { ...state, page: 1, ...changes }, given = new URLSearchParams();
  for (const name of PLAIN) if (to[name] !== "" && to[name] != null) given.set(name, to[name]);
  for (const [column, values] of Object.entries(to.filters)) {
    if (Array.isArray(values)) for (const value of values) given.append(`is.${column}`, value);
    else {
      if (values.least != null) given.set(`from.${column}`, values.least);
      if (values.most != null) given.set(`to.${column}`, values.most);
    }
  }
  if (to.page > 1) given.set("page", to.page);
  if (to.details) given.set("details", "");
  const text = given.toString().replaceAll("=&", "&").replace(/=$/, "");
  return text ? `?${text}` : "./";
}

function go(changes, pixels = pictures) {
  const q = $("q").value.trim(), typed = q === state.q ? {} : { q, like: "", part: "" };
  history.pushState({ pictures: pixels }, "", address({ ...typed, ...changes }));
  show();
}

const filtered = (column, values) => {
  const filters = { ...state.filters };
  const is = Array.isArray(values) ? values.length : values && (values.least != null || values.most != null);
  if (is) filters[column] = values; else delete filters[column];
  return { filters };
};

// ---- What the server is asked

function item() {
  if (state.like) return { id: state.like, ...(state.part && { part: state.part }) };
  if (!state.q && !pictures.length) return null;
  return { ...(state.q && { text: state.q }), ...(pictures.length && { image: pictures.map(each => each.uri) }) };
}

function request() {
  const query = item(), weights = {};
  for (const part of ["image", "text"]) {
    const weight = state[part] === "" ? settings.weights[part] : Number(state[part]);
    if (weight != null) weights[part] = weight;
  }
  const least = state.least === "" ? settings.min_score : state.least === "none" ? null : Number(state.least);
  const filters = Object.fromEntries(Object.entries(state.filters).map(([name, values]) =>
    [name, settings.columns[name] === "choice" ? values.map(typed(name)) : values]));
  const body = { k: settings.k, offset: (state.page - 1) * settings.k };
  if (query) body.items = [query];
  if (query && Object.keys(weights).length) body.weights = weights;
  if (query && least != null) body.min_score = least;
  if (query && state.ranking) body.ranking = state.ranking;
  if (Object.keys(filters).length) body.filters = filters;
  for (const name of ["kind", "sort", "where"]) if (state[name]) body[name] = state[name];
  if (settings.group_by) body.group_by = settings.group_by;
  return body;
}

/** Values of the address are texts; those of a column of true and false are not. */
const typed = name => value => settings.types[name] === "bool" ? value === "true" : value;

async function post(path, body, signal) {
  const answer = await fetch(path, { method: "POST", headers: { "content-type": "application/json" }, body: JSON.stringify(body), signal });
  const found = await answer.json().catch(() => ({ error: { message: `The server answered ${answer.status}.` } }));
  if (!answer.ok) throw new Error(found.error.message.replace(/^item 0: |^the item: /, ""));
  return found;
}

// ---- What is shown

async function show() {
  const before = state;
  state = readState();
  asking?.abort();
  const mine = asking = new AbortController();
  fillForms(before);
  $("results").ariaBusy = "true";
  $("error").textContent = "";
  try {
    if (!settings.lists && !item()) return showNothing("Write words, add a picture, or both.");
    if (state.like && !sought[state.like]) {
      const [[hit]] = (await post("search", { k: 1, filters: { id: [state.like] } }, mine.signal)).results;
      if (hit) nameOf(hit);
    }
    const body = request(), started = performance.now();
    const facets = settings.lists ? { facets: Object.keys(settings.columns).filter(name => settings.columns[name] !== "date") } : {};
    const answers = await Promise.all(settings.sides.map((_, index) =>
      post(index ? "beside/search" : "search", { ...body, ...facets }, mine.signal)));
    if (mine === asking) showAll(answers, body, performance.now() - started);
  } catch (error) {
    if (mine !== asking) return;
    showNothing("");
    $("error").textContent = error.message[0].toUpperCase() + error.message.slice(1);
  } finally {
    if (mine === asking) $("results").ariaBusy = "false";
  }
}

function showNothing(text) {
  $("results").replaceChildren();
  $("pages").replaceChildren();
  showChips();
  $("status").textContent = text;
  $("heading").textContent = item() ? queryName() : "";
}

function showAll(answers, body, milliseconds) {
  const { total, facets = {}, kinds = {} } = answers[0], found = answers.map(answer => answer.results[0]);
  $("heading").textContent = queryName();
  const order = !item() ? "" : state.sort ? " · the best matches, sorted" : " · best match first";
  const last = total == null ? null : Math.max(1, Math.ceil(Math.min(total, 10_000) / settings.k));
  const both = found.length > 1 ? ` · ${found[0].filter(hit => found[1].some(each => each.id === hit.id)).length} found by both` : "";
  $("status").textContent = total == null ? `Page ${state.page}${both}`
    : `${number(total)} ${total === 1 ? "result" : "results"}${total ? order : ""}${last > 1 ? ` · page ${state.page} of ${last}` : ""}${both}`;
  document.title = `${queryName()} – ${settings.heading}`;
  showFacets(facets, kinds, total);
  showChips();
  $("results").replaceChildren(...found.map((hits, index) => h("section", { class: "side" },
    found.length > 1 && h("h3", {}, `${"AB"[index]}: ${settings.sides[index].model}`),
    hits.length ? h("ul", { class: "cards" }, hits.map((hit, place) => card(hit, body.offset + place + 1, index)))
      : nothing(facets, total))));
  showPages(last, found[0].length);
  $("about").textContent = settings.sides.map(side => `${side.model}, ${number(side.rows)} rows`).join(" · ")
    + ` · ${Math.round(milliseconds)} ms · columns: ${Object.keys(settings.types).join(", ")}`;
  $("code").textContent = python(body);
}

function queryName() {
  if (state.like) return `More like ${sought[state.like] ? `“${sought[state.like]}”` : "this"}`;
  if (pictures.length) return state.q ? `Your picture and “${state.q}”` : pictures.length > 1 ? "Your pictures" : "Your picture";
  return state.q ? `“${state.q}”` : "Everything";
}

function fillForms(before) {
  for (const id of ["q", ...SETTINGS]) if (state[id] !== before?.[id]) $(id).value = state[id]; // else what is typed stays
  $("details").checked = state.details;
  $("panel").hidden = !state.details;
  $("pictures").replaceChildren(...pictures.map((each, index) => h("li", {}, h("img", { src: each.uri, alt: each.name }),
    h("button", { type: "button", "aria-label": `Remove ${each.name}`, onclick: () => go({}, pictures.toSpliced(index, 1)) }, "×"))));
  const orders = [["", item() ? "Best match" : "As in the catalogue"]];
  for (const [name, kind] of Object.entries(settings.columns)) {
    const title = label(name);
    if (kind === "date") orders.push([`-${name}`, `Newest (${name})`]);
    if (kind === "number") orders.push([name, `${title}: low to high`], [`-${name}`, `${title}: high to low`]);
  }
  $("sort").replaceChildren(...orders.map(([value, text]) => h("option", { value, selected: value === state.sort }, text)));
  $("parts").hidden = !state.like;
  $("parts").replaceChildren(...[["", "Picture and text"], ["image", "Picture"], ["text", "Text"]].map(([part, text]) =>
    h("a", { class: "button", href: address({ part }), "data-go": "", "aria-current": part === state.part ? "true" : null }, text)));
}

const label = name => (name[0].toUpperCase() + name.slice(1)).replaceAll("_", " ");

function showFacets(facets, kinds, total) {
  const field = document.activeElement, focused = field?.id, places = {};
  const isTyped = field?.type === "number" && (field.value !== field.defaultValue || field.validity.badInput);
  const kept = isTyped ? field.closest("#facets > fieldset") : null;
  for (const box of document.querySelectorAll(".values")) places[box.dataset.name] = box.scrollTop;
  const sets = [];
  if (Object.keys(kinds).length > 1 || state.kind) {
    const shown = Object.entries(KINDS).filter(([kind]) => kinds[kind] || kind === state.kind);
    sets.push(h("fieldset", {}, h("legend", {}, "Shows"), [["", "All"], ...shown].map(([kind, text]) => h("div", { class: "values" },
      h("label", {}, h("input", { type: "radio", name: "kind", id: `kind-${kind}`, checked: kind === state.kind, onchange: () => go({ kind }) }),
        h("span", {}, text), kind && h("span", { class: "dim" }, number(kinds[kind] ?? 0)))))));
  }
  for (const [name, facet] of Object.entries(facets)) {
    const set = facet.values ? choices(name, facet.values) : range(name, facet);
    if (set) sets.push(set);
  }
  const place = kept ? sets.findIndex(set => set.dataset.name === kept.dataset.name) : -1;
  if (place < 0) $("facets").replaceChildren(...sets);
  else { // what is being typed stays as it is
    for (const child of [...$("facets").children]) if (child !== kept) child.remove();
    kept.before(...sets.slice(0, place));
    kept.after(...sets.slice(place + 1));
  }
  $("filters").hidden = !sets.length;
  const count = Object.keys(state.filters).length + (state.kind ? 1 : 0);
  $("chosen").textContent = count ? `(${count})` : "";
  $("close").textContent = `Show ${number(total)} ${total === 1 ? "result" : "results"}`;
  for (const box of document.querySelectorAll(".values")) box.scrollTop = places[box.dataset.name] ?? 0;
  if (focused && document.activeElement?.id !== focused) $(focused)?.focus({ preventScroll: true });
}

function choices(name, values) {
  const chosen = state.filters[name] ?? [], all = values.map(([value, count]) => [String(value), count]);
  for (const value of chosen) if (!all.some(each => each[0] === value)) all.push([value, 0]);
  if (all.length < 2 && !chosen.length) return null;
  all.sort((a, b) => chosen.includes(b[0]) - chosen.includes(a[0]));
  const rows = all.map(([value, count], index) => h("label", { "data-value": value.toLowerCase() }, h("input", {
    type: "checkbox", id: `is-${name}-${index}`, checked: chosen.includes(value),
    onchange: event => go(filtered(name, event.target.checked ? [...chosen, value] : chosen.filter(each => each !== value))),
  }), h("span", {}, value), h("span", { class: "dim" }, number(count))));
  const narrow = text => { for (const row of rows) row.hidden = !row.dataset.value.includes(text.trim().toLowerCase()); };
  const field = rows.length > SHORTEST && h("input", { type: "search", id: `seek-${name}`, "aria-label": `Search ${label(name)}`, placeholder: `Search ${number(rows.length)} values`,
    oninput: event => { sought[`.${name}`] = event.target.value; narrow(event.target.value); } });
  if (field && sought[`.${name}`]) { field.value = sought[`.${name}`]; narrow(field.value); }
  return h("fieldset", {}, h("legend", {}, label(name)), field, h("div", { class: "values", "data-name": name }, rows));
}

function range(name, { least, most }) {
  const chosen = state.filters[name] ?? {};
  if (!(least < most) && !Object.keys(chosen).length) return null;
  const apply = (key, field) => {
    field.defaultValue = field.value;
    go(filtered(name, { ...state.filters[name], [key]: field.value === "" ? null : Number(field.value) }));
  };
  const end = (key, text, value) => h("input", { type: "number", step: "any", id: `${key}-${name}`, value: chosen[key], placeholder: value == null ? "" : String(Math.round(value * 100) / 100),
    "aria-label": `${label(name)} ${text}`, onchange: event => apply(key, event.target) });
  const unit = name === settings.price && settings.currency && !name.includes(settings.currency) ? ` (${settings.currency})` : "";
  return h("fieldset", { "data-name": name }, h("legend", {}, label(name) + unit), h("div", { class: "range" }, end("least", "from", least), "–", end("most", "to", most)));
}

/** The filters that are set, each with the state without it. */
function removals() {
  const set = [];
  if (state.kind) set.push([KINDS[state.kind], { kind: "" }, null]);
  for (const [name, values] of Object.entries(state.filters)) {
    if (Array.isArray(values)) for (const value of values) set.push([`${label(name)}: ${value}`, filtered(name, values.filter(each => each !== value)), name]);
    else {
      const ends = [values.least, values.most], text = ends[0] == null ? `to ${ends[1]}` : ends[1] == null ? `from ${ends[0]}` : ends.join("–");
      set.push([`${label(name)} ${text}`, filtered(name, null), name]);
    }
  }
  if (state.where) set.push([state.where, { where: "" }, null]);
  return set;
}

function showChips() {
  const set = removals();
  const chips = set.map(([text, changes]) => h("li", {}, h("a", { class: "button", href: address(changes), "data-go": "", "aria-label": `Remove the filter ${text}` }, `${text} ×`)));
  if (set.length > 1) chips.push(h("li", {}, h("a", { href: address({ filters: {}, kind: "", where: "" }), "data-go": "" }, "Clear all")));
  $("chips").replaceChildren(...chips);
}

/** What to change where nothing was found. */
function nothing(facets, total) {
  const set = removals(), tips = [], link = (text, changes) => h("li", {}, h("a", { href: address(changes), "data-go": "" }, text));
  if (total) tips.push(link("Go to the first page", {}));
  else for (const [text, changes, name] of set) {
    const count = set.filter(each => each[2] === name).length === 1 && facets[name]?.rows;
    if (count !== 0) tips.push(link(`Remove “${text}”${count ? `: ${number(count)} results` : ""}`, changes));
  }
  if (!total && set.length > 1) tips.push(link("Remove all filters", { filters: {}, kind: "", where: "" }));
  if (!total && item() && (state.least !== "" || settings.min_score != null)) tips.push(link("Show the nearest all the same", { least: "none" }));
  if (!total && state.q) tips.push(h("li", {}, "Check the spelling, or try fewer or more general words."));
  return h("div", { class: "nothing" }, h("p", {}, total ? "There are no further results." : "Nothing was found."), h("ul", {}, tips));
}

function money(value) {
  const sign = settings.currency ?? "", code = SIGNS[sign] ?? sign;
  if (/^[A-Z]{3}$/.test(code)) return new Intl.NumberFormat(undefined, { style: "currency", currency: code }).format(value);
  return `${new Intl.NumberFormat(undefined, { minimumFractionDigits: 2, maximumFractionDigits: 2 }).format(value)} ${sign}`;
}

const plain = value => typeof value === "number" ? number(value) : Array.isArray(value) ? value.join(", ") : typeof value === "object" ? JSON.stringify(value) : String(value);

function nameOf(hit) {
  const title = String(hit.row[settings.title] || hit.row.text || hit.id);
  sought[hit.id] = title.length > 60 ? `${title.slice(0, 60)}…` : title;
  return title;
}

function card(hit, rank, side) {
  const row = hit.row, title = nameOf(hit), like = address({ like: hit.id, part: "", q: "", sort: "" });
  const face = () => h("span", {}, title);
  const image = row.image && h("img", { alt: "", loading: "lazy", src: `${side ? "beside/" : ""}pictures/${encodeURIComponent(hit.id)}`, onerror: event => event.target.replaceWith(face()) });
  const facts = settings.show.map(name => row[name]).filter(value => value != null && value !== "").map(plain).join(" · ");
  const more = state.details ? h("div", {}, h("dl", {}, [["rank", rank], ["score", hit.score?.toFixed(4)], ["id", hit.id], ...Object.entries(row)]
    .filter(([name, value]) => value != null && name !== "image").flatMap(([name, value]) => [h("dt", {}, name), h("dd", {}, name === "score" ? value : plain(value))])),
    settings.explains[side] && item() && h("button", { type: "button", class: "button", onclick: () => explain(hit.id, title, side) }, "Why this result")) : null;
  return h("li", { class: "card" },
    h("a", { class: "picture", href: like, "data-go": "", "data-like": "", tabindex: "-1", "aria-hidden": "true" }, image || face()),
    h(settings.sides.length > 1 ? "h4" : "h3", { class: "name" }, title),
    settings.price && row[settings.price] != null && h("p", { class: "price" }, money(row[settings.price])),
    facts && h("p", { class: "dim" }, facts), more,
    h("a", { class: "more", href: like, "data-go": "", "data-like": "", "aria-label": `More like this: ${title}` }, "More like this"));
}

function showPages(last, shown) {
  const current = state.page, link = (page, text, name) => h("a", { class: "button", href: address({ page }), "data-go": "", "data-page": "", "aria-label": name,
    "aria-current": text === number(current) ? "page" : null }, text);
  const pages = last == null ? [] : [...new Set([1, current - 1, current, current + 1, last])].filter(page => page >= 1 && page <= last);
  const more = last == null ? shown === settings.k : current < last;
  if (current === 1 && !more) return $("pages").replaceChildren();
  $("pages").replaceChildren(...[current > 1 && link(current - 1, "Previous"),
    ...pages.flatMap((page, index) => [index && page - pages[index - 1] > 1 ? "…" : null, link(page, number(page), `Page ${page}`)]),
    more && link(current + 1, "Next")].filter(Boolean));
}

async function explain(id, title, side) {
  const body = $("why-body");
  body.replaceChildren(h("h2", { id: "why-title" }, title), h("p", {}, "…"));
  $("why").showModal();
  try {
    const pairs = await post(side ? "beside/explain" : "explain", { item: item(), id });
    body.replaceChildren(h("h2", { id: "why-title" }, title), ...pairs.flatMap(pair => [h("h3", {}, pair.title),
      h("div", {}, Object.entries(pair.images).map(([caption, src]) => h("figure", {}, h("img", { src, alt: caption }), h("figcaption", { class: "dim" }, caption)))),
      h("p", {}, "Words like the image:"),
      h("p", { class: "words" }, pair.words.map(([word, score, colour]) => {
        const shown = h("span", { title: `cosine ${score.toFixed(3)}` }, word);
        shown.style.background = `rgb(${colour})`;
        shown.style.color = colour.reduce((a, b) => a + b) < 380 ? "#fff" : "#111";
        return shown;
      })),
      h("p", { class: "dim" }, `Warm is similar, cold is not, from the least to the most in this pair. Cosine of image and text: ${pair.similarity.toFixed(3)}.`)]));
  } catch (error) {
    body.replaceChildren(h("h2", { id: "why-title" }, title), h("p", {}, error.message));
  }
}

/** The Python code that repeats the search. */
function python(body) {
  const write = (value, files = []) => Array.isArray(value) ? `[${value.map(each => write(each, files)).join(", ")}]`
    : value === null ? "None" : typeof value === "boolean" ? (value ? "True" : "False")
    : typeof value === "object" ? `{${Object.entries(value).map(([name, each]) => `${JSON.stringify(name)}: ${write(each, files)}`).join(", ")}}`
    : typeof value === "string" && value.startsWith("data:") ? `picture(${JSON.stringify(pictures.find(each => each.uri === value)?.name ?? "picture.jpg")})`
    : JSON.stringify(value);
  const reader = pictures.length && !state.like ? `import base64\n` : "";
  const picture = reader && `\n\ndef picture(path):\n    return "data:image/jpeg;base64," + base64.b64encode(open(path, "rb").read()).decode()\n\n`;
  return `${reader}import json\nfrom urllib.request import Request, urlopen\n${picture}\nbody = ${write(body)}\n`
    + `request = Request(${JSON.stringify(new URL("search", document.baseURI).href)}, json.dumps(body).encode(), {"content-type": "application/json"})\n`
    + `for hit in json.load(urlopen(request))["results"][0]:\n    print(hit["score"], hit["id"])\n`;
}

// ---- What the visitor does

/** Read picture files, large ones made smaller. */
async function addPictures(files) {
  const added = [];
  for (const file of files) {
    let blob = file;
    if (file.size > SEVERAL) {
      const bitmap = await createImageBitmap(file).catch(() => null);
      if (bitmap) {
        const scale = Math.min(1, LARGEST / Math.max(bitmap.width, bitmap.height)), canvas = document.createElement("canvas");
        canvas.width = Math.round(bitmap.width * scale);
        canvas.height = Math.round(bitmap.height * scale);
        const pen = canvas.getContext("2d");
        pen.fillStyle = "#fff";
        pen.fillRect(0, 0, canvas.width, canvas.height);
        pen.drawImage(bitmap, 0, 0, canvas.width, canvas.height);
        blob = await new Promise(done => canvas.toBlob(done, "image/jpeg", 0.92));
      }
    }
    const uri = await new Promise(done => {
      const reader = new FileReader();
      reader.onload = () => done(String(reader.result).replace(/^data:[^;,]*/, /^image\//.test(blob.type) ? `data:${blob.type}` : "data:image/x"));
      reader.readAsDataURL(blob);
    });
    added.push({ name: file.name || "picture", uri });
  }
  if (added.length) go({ like: "", part: "" }, [...pictures, ...added]);
}

function start() {
  $("home").textContent = settings.heading;
  document.title = settings.heading;
  $("search").addEventListener("submit", event => {
    event.preventDefault();
    go({ q: $("q").value.trim(), like: "", part: "" });
  });
  $("upload").addEventListener("change", event => { addPictures([...event.target.files]); event.target.value = ""; });
  addEventListener("paste", event => {
    const files = [...event.clipboardData.files];
    if (files.length) { event.preventDefault(); addPictures(files); }
  });
  addEventListener("dragover", event => { event.preventDefault(); document.body.classList.add("drop"); });
  for (const name of ["dragleave", "drop"]) addEventListener(name, () => document.body.classList.remove("drop"));
  addEventListener("drop", event => { event.preventDefault(); addPictures([...event.dataTransfer.files]); });
  $("sort").addEventListener("change", event => go({ sort: event.target.value }));
  $("details").addEventListener("change", event => go({ details: event.target.checked, page: state.page }));
  $("facets").addEventListener("submit", event => event.preventDefault());
  $("close").addEventListener("click", () => { $("filters").open = false; $("heading").focus(); });
  $("panel").addEventListener("submit", event => {
    event.preventDefault();
    go(Object.fromEntries(SETTINGS.map(id => [id, $(id).value.trim()])));
  });
  $("copy").addEventListener("click", () => navigator.clipboard.writeText($("code").textContent).then(() => { $("copy").textContent = "Copied"; }));
  addEventListener("click", event => {
    const link = event.target.closest?.("a[data-go]");
    if (!link || event.ctrlKey || event.metaKey || event.shiftKey || event.button) return;
    event.preventDefault();
    const isNew = link.id === "home" || "like" in link.dataset;
    history.pushState({ pictures: isNew ? [] : pictures }, "", link.getAttribute("href"));
    if (isNew) state = undefined;
    show();
    if (isNew || "page" in link.dataset) { $("heading").focus(); scrollTo(0, 0); }
  });
  addEventListener("popstate", show);
  const wide = matchMedia("(min-width: 62.01rem)"), fold = () => { $("filters").open = wide.matches; };
  wide.addEventListener("change", fold);
  fold();
  show();
}

fetch("page.json").then(answer => answer.json()).then(found => { settings = found; start(); })
  .catch(() => { $("error").textContent = "The server does not answer."; });

// Runs once, when the component with the examples is there: `element`, which can `trigger` its events.
element.addEventListener("click", (event) => {
  const example = event.target.closest("[data-df-example]");
  if (example) trigger("click", { text: example.dataset.dfExample });
});
// Gradio's own autofocus scrolls a phone past the headline; there it would open a keyboard, too.
const hasRoom = matchMedia("(min-width: 901px)").matches;
const focusBox = () => {
  const box = document.querySelector("#df-box textarea");
  box?.focus({ preventScroll: true });
  return box !== null;
};
if (hasRoom && !focusBox()) {
  const wait = new MutationObserver(() => focusBox() && wait.disconnect());
  wait.observe(document.body, { childList: true, subtree: true });
}
// The same message twice is never meant.
document.addEventListener("click", (event) => {
  if (event.detail > 1 && event.target.closest("#df-box .submit-button")) event.stopImmediatePropagation();
}, true);
document.addEventListener("click", (event) => {
  if (event.target.closest("[data-df-theme]")) document.body.classList.toggle("dark");
});

// What a step has tried, beside the step that is pointed at, tapped or focused. `tried_of` in render.py writes
// `data-df-tried`; all of it is put in as text.
const shown = document.createElement("div");
shown.id = "df-tried";
shown.role = "tooltip";
shown.popover = "manual"; // above all else, and not cut off where the conversation scrolls
document.querySelector(".gradio-container").append(shown);
let step = null; // that it is shown of

const make = (name, text, kind) => {
  const made = document.createElement(name);
  made.textContent = text;
  if (kind) made.className = kind;
  return made;
};
const row = (label, text, kind, note) => {
  const value = document.createElement("dd");
  value.append(make("span", text, kind));
  if (note) value.append(make("small", note));
  return [make("dt", label), value];
};
const visible = (text) => text.replaceAll("\n", "↵").replaceAll("\t", "⇥");

const place = () => {
  const box = step.getBoundingClientRect(), own = shown.getBoundingClientRect();
  const below = box.bottom + 4; // so that the text before it, and the headline, stay readable
  const fits = below + own.height <= innerHeight - 4;
  shown.style.top = `${fits ? below : Math.max(4, box.top - own.height - 4)}px`;
  shown.style.left = `${Math.max(8, Math.min(box.left, innerWidth - own.width - 8))}px`;
};
const hide = () => {
  step?.removeAttribute("aria-describedby");
  step = null;
  shown.hidePopover();
};
const show = (pointed) => {
  if (pointed === step) return;
  if (step) hide();
  const [more, ...lines] = pointed.dataset.dfTried.split("\n");
  const taken = pointed.querySelector("span"), own = pointed.querySelector(".df-bonus");
  const written = document.createElement("dl"), tried = document.createElement("dl");
  if (taken) written.append(...row("guessed right", visible(taken.textContent), "df-tried-taken"));
  if (own) written.append(...row("the big model’s own", visible(own.textContent), "df-bonus"));
  for (const line of lines) {
    const [after, fromText, text] = line.split("\t");
    const where = after === "0" ? "from the start" : `after ${after} token${after === "1" ? "" : "s"}`;
    tried.append(...row(where, text, "", fromText === "1" ? "from the text before" : ""));
  }
  shown.replaceChildren(make("p", pointed.dataset.dfStep), written);
  shown.append(make("p", lines.length ? "Tried as well, and not taken:" : "Nothing else was tried."));
  if (lines.length) shown.append(tried);
  if (more !== "0") shown.append(make("p", `and ${more} less likely`));
  step = pointed;
  step.setAttribute("aria-describedby", shown.id);
  shown.showPopover();
  place();
};
const stepOf = (event) => event.target.closest?.("[data-df-tried]");

for (const kind of ["pointerover", "focusin"]) {
  document.addEventListener(kind, (event) => {
    const pointed = stepOf(event);
    if (pointed) show(pointed);
    else if (step && !shown.contains(event.target)) hide();
  });
}
document.addEventListener("focusout", (event) => stepOf(event) === step && step && hide());
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && step) hide();
  const from = stepOf(event), by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
  if (!from || !by) return;
  event.preventDefault();
  const steps = [...from.parentElement.querySelectorAll("[data-df-tried]")];
  const to = steps[steps.indexOf(from) + by];
  if (!to) return;
  from.tabIndex = -1;
  to.tabIndex = 0;
  to.focus();
});
for (const kind of ["scroll", "resize"]) {
  addEventListener(kind, () => step && (step.isConnected ? place() : hide()), true);
}

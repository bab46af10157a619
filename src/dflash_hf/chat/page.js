// Runs once, when the component with the newest turn is there: `element`, which can `trigger` its events.
element.addEventListener("click", (event) => {
  const example = event.target.closest("[data-df-example]");
  if (example) trigger("click", { text: example.dataset.dfExample });
});
// The conversation stays scrolled to its end while it grows, unless someone has scrolled up to read.
const follow = () => {
  const box = document.querySelector("#df-scroll");
  if (!box) return setTimeout(follow, 100);
  let atEnd = true;
  box.addEventListener("scroll", () => {
    atEnd = box.scrollHeight - box.scrollTop - box.clientHeight < 48;
  });
  new MutationObserver(() => {
    if (atEnd) box.scrollTop = box.scrollHeight;
  }).observe(box, { childList: true, subtree: true, characterData: true });
};
follow();
// A race that begins below the edge of its column comes into view, once.
let racing = false;
new MutationObserver(() => {
  const race = document.querySelector(".df-race");
  const now = race !== null && race.dataset.state !== "done";
  if (race && (now || racing)) race.scrollIntoView({ block: "nearest" });
  racing = now;
}).observe(document.body, { childList: true, subtree: true });
// The same message twice is never meant.
document.addEventListener("click", (event) => {
  if (event.detail > 1 && event.target.closest("#df-box .submit-button")) event.stopImmediatePropagation();
}, true);
document.addEventListener("click", (event) => {
  if (event.target.closest("[data-df-theme]")) document.body.classList.toggle("dark");
});

// Runs once, when the component with the examples is there: `element`, which can `trigger` its events.
element.addEventListener("click", (event) => {
  const example = event.target.closest("[data-df-example]");
  if (example) trigger("click", { text: example.dataset.dfExample });
});
// The same message twice is never meant.
document.addEventListener("click", (event) => {
  if (event.detail > 1 && event.target.closest("#df-box .submit-button")) event.stopImmediatePropagation();
}, true);
document.addEventListener("click", (event) => {
  if (event.target.closest("[data-df-theme]")) document.body.classList.toggle("dark");
});

() => {
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
  // An example is asked as a person would: its pictures go through the upload, its text through the message box.
  let asking = false;
  const ask = async (button) => {
    const box = document.querySelector("#df-box");
    const images = [...button.querySelectorAll("img")];
    const input = box.querySelector("input[type=file]");
    if (images.length && input) {
      const files = new DataTransfer();
      for (const [index, image] of images.entries()) {
        const bytes = Uint8Array.from(atob(image.src.split(",")[1]), (letter) => letter.charCodeAt(0));
        files.items.add(new File([bytes], `example-${index + 1}.png`, { type: "image/png" }));
      }
      input.files = files.files;
      input.dispatchEvent(new Event("change", { bubbles: true }));
    }
    const area = box.querySelector("textarea");
    area.value = button.dataset.dfExample;
    area.dispatchEvent(new Event("input", { bubbles: true }));
    let sent = false;
    // Until the question stands in the place of the button; an upload may take long, or fail.
    for (let wait = 0; wait < 1200 && button.isConnected; wait++) {
      await new Promise((done) => setTimeout(done, 50));
      const ready = box.querySelectorAll(".thumbnail-item img, .thumbnail-image img").length >= images.length;
      const submit = box.querySelector(".submit-button");
      if (sent || !ready || !submit || submit.disabled) continue;
      submit.click();
      sent = true;
    }
  };
  document.addEventListener("click", (event) => {
    const example = event.target.closest("[data-df-example]");
    if (!example || asking) return;  // a double click asks once
    asking = true;
    ask(example).finally(() => {
      asking = false;
    });
  });
  // The same message twice is never meant.
  document.addEventListener("click", (event) => {
    if (event.detail > 1 && event.target.closest("#df-box .submit-button")) event.stopImmediatePropagation();
  }, true);
  document.addEventListener("click", (event) => {
    if (event.target.closest("[data-df-theme]")) document.body.classList.toggle("dark");
  });
}

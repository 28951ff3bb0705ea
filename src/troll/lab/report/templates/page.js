"use strict";
(() => {
  const root = document.documentElement;
  const theme = document.getElementById("theme");
  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  theme.hidden = false;
  theme.addEventListener("click", () => {
    const now = root.style.colorScheme || (dark.matches ? "dark" : "light");
    root.style.colorScheme = now === "dark" ? "light" : "dark";
  });

  for (const browse of document.querySelectorAll("[data-browse]")) {
    const steps = [...browse.querySelectorAll(".step")];
    const chooser = browse.querySelector(".chooser");
    const slider = chooser.querySelector("input");
    const show = () => {
      steps.forEach((step, i) => { step.hidden = i !== Number(slider.value); });
      chooser.querySelector("output").textContent = steps[slider.value].dataset.name;
      hide();
    };
    chooser.hidden = steps.length < 2;
    browse.classList.toggle("chosen", steps.length > 1);
    slider.addEventListener("input", show);
    for (const button of chooser.querySelectorAll("button")) {
      button.addEventListener("click", () => {
        slider.value = Number(slider.value) + Number(button.dataset.move);
        show();
      });
    }
    queueMicrotask(show);
  }

  const tip = document.getElementById("tip");
  let shown = null;
  function hide() {
    tip.hidden = true;
    if (shown) shown.classList.remove("on");
    shown = null;
  }
  function tell(token) {
    hide();
    shown = token;
    token.classList.add("on");
    const name = document.createElement("b");
    name.textContent = token.textContent;
    tip.replaceChildren(name, token.dataset.tip);
    tip.hidden = false;
    place();
  }
  function place() {
    if (!shown) return;
    const box = shown.getClientRects()[0];
    const left = Math.min(Math.max(8, box.left), root.clientWidth - tip.offsetWidth - 8);
    const above = box.top - tip.offsetHeight - 8;
    tip.style.left = left + "px";
    tip.style.top = (above > 60 ? above : box.bottom + 8) + "px";
  }
  for (const token of document.querySelectorAll(".completion .t")) {
    token.dataset.tip = token.title;
    token.removeAttribute("title");
  }
  document.addEventListener("pointerover", (event) => {
    const token = event.target.closest(".completion .t");
    if (token) tell(token);
    else if (shown && !shown.parentElement.matches(":focus")) hide();
  });
  document.addEventListener("scroll", place, { passive: true });
  for (const completion of document.querySelectorAll(".completion")) {
    const first = () => completion.querySelector(".t");
    completion.addEventListener("focus", () => { if (first() && completion.matches(":focus-visible")) tell(first()); });
    completion.addEventListener("blur", hide);
    completion.addEventListener("keydown", (event) => {
      const move = { ArrowRight: "nextElementSibling", ArrowLeft: "previousElementSibling" }[event.key];
      if (event.key === "Escape") hide();
      if (!move) return;
      event.preventDefault();
      const from = shown && shown.parentElement === completion ? shown[move] : first();
      if (!from || !from.matches(".t")) return;
      from.scrollIntoView({ block: "nearest" });
      tell(from);
    });
  }
})();

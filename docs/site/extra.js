// Tables that scroll sideways on narrow windows can be reached by keyboard.  The theme wraps them when it starts.
new MutationObserver(() => {
  for (const wrap of document.querySelectorAll(".md-typeset__scrollwrap:not([tabindex])")) {
    wrap.tabIndex = 0;
    wrap.setAttribute("role", "region");
    wrap.setAttribute("aria-label", "Table");
  }
}).observe(document.documentElement, { childList: true, subtree: true });

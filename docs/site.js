// Whoever has no mouse can scroll a table that is wider than the page: it takes the focus.
new MutationObserver(() => {
  for (const table of document.querySelectorAll(".md-typeset__scrollwrap")) table.tabIndex = 0
}).observe(document.documentElement, { childList: true, subtree: true })

// Scores of the search: Sphinx's own (its searchtools.js), but a title that holds the whole query comes first, and pages
// for those who change attncore come last.
"use strict";

const FOR_DEVELOPERS = /^(docs\/design\/|docs\/releasing$|CHANGELOG$|CONTRIBUTING$)/;

var Scorer = {
  score: ([page, , , , score, , kind]) => score + (kind === "title" ? 20 : 0) - (FOR_DEVELOPERS.test(page) ? 10 : 0),
  objNameMatch: 11,
  objPartialMatch: 6,
  objPrio: { 0: 15, 1: 5, 2: -5 },
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,
};

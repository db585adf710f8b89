"""Tables and sentences of README.md, docs/ and bench/, made from claims, from bench/results and from the code.

A page holds the lines `<!-- generated: results.coverage -->` and `<!-- end -->`; the text between them is what the
macro `coverage` of the Jinja template results.jinja in this folder returns. To add a table:

1. Write its claims in bench/claims/claims.yaml. `claim("NAME")` is a claim with its result, see `formats.Figures`: what
   `python -m bench.claims` has measured, or else what is expected, with a mark. Comparisons with other libraries are
   files in bench/results, `read("NAME")`. Figures that others published go to cited.yaml, with their source.
2. Write a macro in a template. The filters that format numbers are in `bench.tables.formats`. Links begin with
   bench/results/ on every page. A macro whose name begins with an underscore is private to its template.
3. Put the two lines where the table belongs, and run `python -m bench.tables`, which fills in what is between them.

Each macro is used in one place. Parts that are made from the code instead begin with `<!-- settings module:Class -->`,
`<!-- names: SYSTEM -->` or `<!-- api module: name, name -->`, see `bench.tables.reference`.
`python -m bench.tables --check` names the parts that are not up to date.
"""

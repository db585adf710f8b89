"""Tables and sentences of README.md, docs/ and bench/, made from the figures in bench/results and from the code.

A page holds the lines `<!-- generated: coverage.paper -->` and `<!-- end -->`; the text between them
is what the macro `paper` of the Jinja template coverage.jinja in this folder returns. To add a table:

1. Commit its JSON in bench/results. Figures that others published go to cited.yaml, with their source.
2. Write a macro in the template of its part of the page, or in a new template. `read("NAME")` is the content of
   bench/results/NAME.json; the filters that format numbers are in `bench.tables.formats`. Links begin with
   bench/results/ on every page. A macro whose name begins with an underscore is private to its template.
3. Put the two lines where the table belongs, and run `python -m bench.tables`, which fills in what is between them.

Each macro is used in one place. Parts that are made from the code instead begin with `<!-- settings module:Class -->`,
`<!-- names: SYSTEM -->` or `<!-- api module: name, name -->`, see `bench.tables.reference`.
`python -m bench.tables --check` names the parts that are not up to date.
"""

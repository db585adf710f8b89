"""python -m jaxrl.export: see `jaxrl.cli.export`; in Python, `jaxrl.export` is a function."""

from jaxrl.cli.export import main

if __name__ == "__main__":
    raise SystemExit(main())
else:
    raise ImportError("jaxrl.export is a function and a command: import jaxrl, or jaxrl.cli.export")

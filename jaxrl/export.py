"""python -m jaxrl.export: see `jaxrl.cli.export`."""

from jaxrl.cli.export import main

if __name__ == "__main__":
    raise SystemExit(main())

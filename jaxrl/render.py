"""python -m jaxrl.render: see `jaxrl.cli.render`."""

from jaxrl.cli.render import main

if __name__ == "__main__":
    raise SystemExit(main())

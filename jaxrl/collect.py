"""python -m jaxrl.collect: see `jaxrl.cli.collect`."""

from jaxrl.cli.collect import main

if __name__ == "__main__":
    raise SystemExit(main())

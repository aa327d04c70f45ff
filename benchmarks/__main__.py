"""`python -m benchmarks COMMAND`: measure this library on the machine at hand."""

from benchmarks.app import app
from polyhead.cli.errors import end_on_sigterm

if __name__ == "__main__":
    end_on_sigterm()
    app(prog_name="python -m benchmarks")

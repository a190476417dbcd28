"""All decoders of the installed Transformers: refused by a line, or trained right on two ranks and in two stages."""

import pytest

from tests.ranks import RankPool
from tests.runtime.sweep import BOUND, PAGE, architectures, page, sweep


@pytest.mark.long
@pytest.mark.timeout(600)
def test_no_decoder_is_silently_wrong(ranks: RankPool) -> None:
    verdicts = sweep(ranks, architectures())
    for verdict in verdicts:
        for error in (verdict.ranks_error, verdict.stages_error, verdict.split_error):
            assert error is None or error < BOUND, verdict
        for line in (verdict.refusal, verdict.no_stages, verdict.no_split):
            assert len(line) <= 360 and "\n" not in line, verdict
    written = PAGE.read_text().splitlines()
    # Errors differ from machine to machine, verdicts do not.
    ours = [line.split("|")[1].strip() for line in page(verdicts) if line.startswith("| ")]
    assert ours == [line.split("|")[1].strip() for line in written if line.startswith("| ")]
    assert f"{sum(not v.refusal for v in verdicts)} of {len(verdicts)} are trained" in " ".join(written)

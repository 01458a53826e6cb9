"""
# Encodings: the error of each block, the bytes of each row, and what must not change

The oracle is the chapter itself: its table, its bound and its three properties.
"""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.streams import Accelerator
from zero3.comm.encodings import Encoding, Int4, Int8, is_encoding

ENCODINGS = (Int8(), Int4(), Int8(2), Int4(2), Int8(30), Int4(30), Int4(256))
DTYPES = (torch.float32, torch.float64, torch.bfloat16)
LARGEST = torch.finfo(torch.float32).max
TINY = torch.finfo(torch.bfloat16).tiny
# The division by the scale is rounded to fp32, and so is a double. Each moves a number by at most
# 2^-24 of the block's largest one, which is 2^-16 of half a scale in 8 bits.
ROUNDING = 1 + 2**-14


@st.composite
def any_rows(draw):
    """
    Rows of any length whose blocks have any size from the smallest to the largest float, with a few
    numbers that hypothesis chooses.
    """
    count = draw(st.integers(1, 3))
    numel = draw(st.integers(1, 300))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1 << 30)))
    powers = torch.randint(-140, 127, (count, -(-numel // 30), 1), generator=generator)
    sizes = powers.double().exp2().expand(-1, -1, 30).flatten(1)[:, :numel]
    rows = torch.randn(count, numel, generator=generator).double() * sizes
    floats = st.floats(width=32, allow_nan=False, allow_infinity=False)
    for at in draw(st.lists(st.integers(0, count * numel - 1), max_size=8)):
        rows.view(-1)[at] = draw(floats)
    return rows.clamp_(-LARGEST, LARGEST)


def blocks_of(rows, block):
    """`(rows, blocks, block)` fp64, padded with zeros"""
    padded = torch.zeros(len(rows), -(-rows.shape[1] // block) * block, dtype=torch.double)
    padded[:, : rows.shape[1]] = rows
    return padded.view(len(rows), -1, block)


def scales_of(coded, blocks):
    """The scales at the end of each row: `(rows, blocks, 1)` fp64"""
    scales = coded[:, -2 * blocks :].clone(memory_format=torch.contiguous_format)
    return scales.view(torch.bfloat16).double().unsqueeze(2)


@pytest.mark.parametrize("block", [4, 64])
def test_four_numbers_in_four_bits_become_the_table_of_the_chapter(block):
    """
    The head of `encodings.py`, digit by digit: codes 1, -3, 7 and 0 with the scale 0.5. Breaks if
    the scale is not that of the largest number, or the codes change places in their bytes.
    Proves `Int4`, `Int4._pack`, `Int4._unpack`.
    """
    values = torch.tensor([[0.6, -1.3, 3.5, 0.0]])
    coded = Int4(block).encode(values)
    scale = torch.tensor([0.5], dtype=torch.bfloat16).view(torch.uint8).tolist()
    assert coded.tolist() == [[(1 + 8) + 16 * (-3 + 8), (7 + 8) + 16 * (0 + 8), *scale]]
    decoded = Int4(block).decode(coded, 4)
    assert decoded.tolist() == [[0.5, -1.5, 3.5, 0.0]]
    # Numbers of this size are rounded to a multiple of 2^-23 themselves.
    errors = (values - decoded).abs()
    assert torch.allclose(errors, torch.tensor([[0.1, 0.2, 0.0, 0.0]]), rtol=0, atol=2**-22)


def test_the_largest_code_is_reached_whichever_way_the_scale_is_rounded():
    """
    The largest number over its scale is between 126.5 and 127.5, or 6.97 and 7.03. Both ends are
    reached. Breaks if the scale is rounded to fewer than 8 digits: the quotient would round to 128,
    which no byte has.
    Proves `Int8.encode`.
    """
    # Every scale from 128 to 512 that bfloat16 has, and what lies on, before and after the middle
    # of two of them, where rounding is worst.
    steps = torch.arange(128, 512, 0.5)
    largest = torch.cat([steps, steps * (1 + 2**-22), steps * (1 - 2**-22)]).unsqueeze(1)
    for encoding, least, most in ((Int8(2), 126.5, 127.5), (Int4(2), 6.97, 7.03)):
        # The quotient is `levels` over what rounding does to the scale.
        values = largest * encoding.levels
        coded = encoding.encode(values)
        quotients = values.double() / scales_of(coded, 1)[:, 0]
        assert least < quotients.min() < least + 0.02 and most - 0.02 < quotients.max() < most
        codes = encoding.decode(coded, 1).double() / scales_of(coded, 1)[:, 0]
        assert (codes == encoding.levels).all()


@settings(max_examples=150, deadline=None)
@given(rows=any_rows(), encoding=st.sampled_from(ENCODINGS), dtype=st.sampled_from(DTYPES))
def test_no_number_moves_further_than_the_bound(rows, encoding, dtype):
    """
    Half a scale, and half of the block's largest number over 127 or 7, plus one part in 256. A
    block below the smallest scale becomes zeros. Breaks if a scale is shared by other neighbours
    than the ones that it was computed for.
    Proves `Int8`, `Int8.encode`, `Int8.decode`.
    """
    rows = rows.to(dtype)
    # Rounding to bfloat16 may have made an infinity of the largest floats.
    rows[rows.isinf()] = 1
    coded = encoding.encode(rows)
    decoded = encoding.decode(coded, rows.shape[1])
    assert decoded.dtype == torch.float32 and decoded.shape == rows.shape
    blocks = blocks_of(rows, encoding.block)
    errors = (blocks - blocks_of(decoded, encoding.block)).abs()
    scales = scales_of(coded, blocks.shape[1])
    largest = blocks.abs().amax(dim=2, keepdim=True)
    kept = scales > 0
    within = errors <= ROUNDING * scales / 2
    bound = largest / (2 * encoding.levels) * (1 + 2**-8)
    assert (within & (errors <= ROUNDING * bound))[kept.expand_as(errors)].all()
    # The two percentages of the chapter.
    percent = 0.4 if encoding.levels == 127 else 7.2
    assert (errors <= percent / 100 * largest)[kept.expand_as(errors)].all()
    assert (largest[~kept] < encoding.levels * TINY).all()
    assert (largest[kept] > encoding.levels * TINY * (1 - 2**-8)).all()
    assert (decoded[rows == 0] == 0).all()


@settings(max_examples=150, deadline=None)
@given(rows=any_rows(), encoding=st.sampled_from(ENCODINGS))
def test_what_was_decoded_encodes_to_the_same_bytes(rows, encoding):
    """
    So a second round loses nothing, from the smallest numbers to the largest float: no code times
    its scale overflows either. Breaks if the largest number of a block is not decoded as the
    largest code times the scale.
    Proves `Int8.decode`.
    """
    coded = encoding.encode(rows)
    decoded = encoding.decode(coded, rows.shape[1])
    assert decoded.isfinite().all()
    assert torch.equal(encoding.encode(decoded), coded)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.half])
@pytest.mark.parametrize("encoding", [Int8(2), Int4(2)])
def test_numbers_of_16_bits_keep_their_bytes_when_they_are_rounded_to_16_bits(encoding, dtype):
    """
    Every bf16 and every fp16 number as the largest of its block, beside smaller ones. A code times
    a scale has more digits than these types, so what was decoded is rounded once more. Breaks if
    that moves a scale, or if a finite number becomes an infinity.
    Proves `Int8.encode`, `Int8.decode`.
    """
    largest = torch.arange(0, 1 << 15, dtype=torch.int16).view(dtype)
    largest = largest[largest.isfinite()].repeat(10)
    parts = torch.rand(len(largest), generator=torch.Generator().manual_seed(0)) * 2 - 1
    blocks = torch.stack([largest, (largest.double() * parts).to(dtype)], 1)
    coded = encoding.encode(blocks)
    exact = encoding.decode(coded, 2)
    decoded = exact.to(dtype)
    assert decoded.isfinite().all() and torch.equal(encoding.encode(decoded), coded)
    # One scale for the largest numbers of a type, and half of it for the others.
    errors = (exact.double() - blocks.double()).abs() / scales_of(coded, 1)[:, 0].clamp(min=TINY)
    near = largest > 0.98 * torch.finfo(dtype).max
    kept = scales_of(coded, 1)[:, 0, 0] > 0
    assert errors[near].max() <= 1 and errors[kept & ~near].max() <= ROUNDING / 2


def test_zeros_have_the_codes_and_the_scale_of_zero():
    """
    Padding, and what a rank has no gradient for. Breaks if zero is divided by zero: a NaN becomes
    another code on each device.
    Proves `Int8.encode`.
    """
    zeros = torch.zeros(1, 4)
    assert Int8(2).encode(zeros).tolist() == [[0] * 4 + [0] * 4]
    assert Int4(2).encode(zeros).tolist() == [[8 + 16 * 8] * 2 + [0] * 4]


@settings(max_examples=100, deadline=None)
@given(rows=any_rows(), encoding=st.sampled_from(ENCODINGS),
       bad=st.sampled_from([math.inf, -math.inf, math.nan]), at=st.integers(0, 1 << 20))
def test_an_infinity_or_a_nan_spoils_its_block_and_no_other(rows, encoding, bad, at):
    """
    Its block is infinite or NaN, each element of it; the bytes of the other blocks are as before.
    Breaks if a code of such a block overflows into the byte of a neighbour, or if the overflow is
    rounded to a finite number.
    Proves `Int8.encode`, `Int4._pack`.
    """
    numel = rows.shape[1]
    row, column = divmod(at % rows.numel(), numel)
    spoilt = rows.clone()
    spoilt[row, column] = bad
    decoded = encoding.decode(encoding.encode(spoilt), numel)
    hit = torch.zeros(rows.shape, dtype=torch.bool)
    first = column // encoding.block * encoding.block
    hit[row, first : first + encoding.block] = True
    assert not decoded[hit].isfinite().any()
    assert torch.equal(decoded[~hit], encoding.decode(encoding.encode(rows), numel)[~hit])


def test_a_double_beyond_fp32_is_infinite_and_never_a_wrong_number():
    """
    As converting it to fp32 says. Breaks if it is clamped to the largest float.
    Proves `Int8.encode`.
    """
    for encoding in (Int8(2), Int4(2)):
        beyond = torch.tensor([[1e39, 1.0, 2.0, 3.0]], dtype=torch.double)
        decoded = encoding.decode(encoding.encode(beyond), 4)
        assert decoded.isfinite().tolist() == [[False, False, True, True]]
        largest = torch.tensor([[LARGEST, -LARGEST, 2.0, 3.0]])
        assert encoding.decode(encoding.encode(largest), 4).isfinite().all()


def test_blocks_below_the_smallest_scale_become_zeros():
    """
    1e-36 is a number in 4 bits and none in 8 bits, because the scale is a 127th of it. Breaks if a
    scale with fewer digits is kept: the largest code would be above 127.
    Proves `Int8.encode`.
    """
    for encoding in (Int8(2), Int4(2)):
        edge = encoding.levels * TINY
        small = torch.tensor([[edge * 0.99, edge / 3, edge, edge / 3]])
        decoded = encoding.decode(encoding.encode(small), 4)
        assert decoded[0, :2].tolist() == [0, 0]
        assert decoded[0, 2] == edge
    one = torch.tensor([[1e-36]])
    assert Int8().decode(Int8().encode(one), 1) == 0
    assert 0.93e-36 < Int4().decode(Int4().encode(one), 1) < 1.08e-36


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("rows", [0, 1, 3])
@pytest.mark.parametrize("numel", [0, 1, 2, 29, 30, 31, 64, 65, 300])
def test_a_row_takes_its_codes_and_two_bytes_for_each_block(encoding, rows, numel):
    """
    Also no rows, and rows without elements, of which a rank may have some. Breaks if the padding of
    the last block is sent.
    Proves `Int8.nbytes`, `Int8._blocks`, `Int8._code_bytes`, `Int4._code_bytes`.
    """
    bits = 8 if encoding.levels == 127 else 4
    nbytes = math.ceil(numel * bits / 8) + 2 * math.ceil(numel / encoding.block)
    coded = encoding.encode(torch.ones(rows, numel))
    assert coded.shape == (rows, nbytes) and coded.dtype == torch.uint8
    assert encoding.nbytes(numel) == nbytes and coded.untyped_storage().nbytes() == rows * nbytes
    decoded = encoding.decode(coded, numel)
    # The scale is rounded to 8 digits; the codes are all the largest.
    assert decoded.shape == (rows, numel) and ((decoded - 1).abs() <= 2**-8).all()


def test_an_element_costs_what_the_chapter_says():
    """
    1.03 and 0.53 bytes. Breaks if the scale of a block gets wider.
    Proves `Int8.nbytes`.
    """
    assert Int8().nbytes(6400) / 6400 == 1 + 2 / 64
    assert Int4().nbytes(6400) / 6400 == 1 / 2 + 2 / 64


@pytest.mark.parametrize("encoding", [Int8(), Int4(), Int4(30)])
def test_rows_may_lie_in_memory_in_any_way(encoding):
    """
    A transpose, every second element, columns of a wider buffer, one row many times, rows that need
    a gradient; and bytes that begin at an odd address. None is changed, and each row is encoded by
    itself. Breaks where an encoding takes a view of memory that is laid out otherwise.
    Proves `Int8.encode`, `Int8.decode`, `Int8._pack`, `Int8._unpack`.
    """
    torch.manual_seed(0)
    wide = torch.randn(140, 142)
    for rows in (wide[:3, :141].t(), wide[:2, ::2], wide[:, 3:70], wide[:1].expand(3, -1),
                 wide[:1, 1:], wide[:2].clone().requires_grad_()):
        before = rows.detach().clone()
        coded = encoding.encode(rows)
        numel = rows.shape[1]
        assert not coded.requires_grad and torch.equal(rows, before)
        for row, code in zip(before, coded, strict=True):
            assert torch.equal(encoding.encode(row.clone().unsqueeze(0))[0], code)
        # As rows of a buffer that has a byte in front of each.
        buffer = torch.zeros(len(coded), coded.shape[1] + 1, dtype=torch.uint8)
        buffer[:, 1:] = coded
        decoded = encoding.decode(buffer[:, 1:], numel)
        assert torch.equal(decoded, encoding.decode(coded, numel))
        assert torch.equal(buffer[:, 1:], coded)


@pytest.mark.parametrize("block", [0, 1, 3, 63, -2, 2.0, "64", True, None, 1 << 21])
def test_a_block_that_cannot_work_is_refused(block):
    """
    Two neighbours share a byte in 4 bits, so an odd block would share one with the next block.
    Proves `Int8`.
    """
    for kind in (Int8, Int4):
        with pytest.raises(ValueError) as error:
            kind(block)
        said = f"{error.value}"
        assert said.startswith(f"{kind.__name__}. Expected: `block`") and "What to do: " in said
        assert f"Got: {block!r}" in said


def test_on_an_accelerator_nothing_races_and_the_host_does_not_wait():
    """
    An encoding is used while other streams compute, so it must not make the host wait. Breaks if it
    looks at a value.
    Proves I9, `Int8.encode`, `Int8.decode`.
    """
    torch.manual_seed(0)
    values = torch.randn(3, 101)
    for encoding in (Int8(), Int4()):
        expected = encoding.decode(encoding.encode(values), 101)
        with Accelerator() as device:
            rows = values.clone()
            waits = len(device.waits)
            decoded = encoding.decode(encoding.encode(rows), 101)
            assert device.find(decoded).place.type == "cuda"
            assert len(device.waits) == waits and not device.problems
        assert torch.equal(decoded, expected)


class Halves:
    """
    ## An encoding of one's own: the upper half of each fp32 number

    Two bytes for an element and no scales, so there are no blocks either.
    """

    def nbytes(self, numel: int) -> int:
        return 2 * numel

    def encode(self, rows: torch.Tensor) -> torch.Tensor:
        halves = torch.empty(rows.shape, dtype=torch.bfloat16, device=rows.device)
        return halves.copy_(rows).view(torch.uint8)

    def decode(self, coded: torch.Tensor, numel: int) -> torch.Tensor:
        # A copy, because a view of two bytes must begin at an even one.
        halves = torch.empty(len(coded), numel, dtype=torch.bfloat16, device=coded.device)
        halves.view(torch.uint8).copy_(coded)
        return halves.float()


@settings(max_examples=50, deadline=None)
@given(rows=any_rows())
def test_an_encoding_of_ones_own_needs_three_methods(rows):
    """
    `Halves` has all that is asked for, and the same properties as the two of the chapter.
    Proves `Encoding`, `is_encoding`.
    """
    own: Encoding = Halves()
    assert is_encoding(own) and is_encoding(Int8()) and is_encoding(Int4())
    # The class itself, and anything else.
    assert not any(map(is_encoding, (Halves, Int8, None, "int8", torch.int8, [])))
    asked = {name for name in vars(Encoding) if name[0] != "_"}
    assert asked == {"nbytes", "encode", "decode"} == {name for name in vars(Halves)
                                                       if name[0] != "_"}
    numel = rows.shape[1]
    coded = own.encode(rows)
    assert coded.shape == (len(rows), own.nbytes(numel))
    decoded = own.decode(coded, numel)
    assert torch.equal(decoded, rows.bfloat16().float())
    assert torch.equal(own.encode(decoded), coded)

from conjoin.data.make.scenes import NEITHER, PRIVATE, SHARED, shared_patches, shared_tokens

IMAGE = [{"object": "dog", "box": [0.0, 0.0, 0.5, 0.5]}, {"object": "bus", "box": [0.5, 0.25, 1.0, 1.0]}]
TEXT = [{"object": "bus", "start": 4, "end": 7}, {"object": "red owl", "start": 12, "end": 19}]


def test_patches_are_shared_private_or_background():
    truth = shared_patches(IMAGE, TEXT, 4).reshape(4, 4)
    assert truth[:2, :2].tolist() == [[PRIVATE] * 2] * 2
    assert truth[1:, 2:].tolist() == [[SHARED] * 2] * 3
    assert truth[0, 2:].tolist() == [NEITHER] * 2 and truth[2:, :2].tolist() == [[NEITHER] * 2] * 2


def test_tokens_of_a_name_are_shared_or_private():
    #        [CLS]    the     b       us      and      red      owl       [PAD]
    offsets = [(0, 0), (0, 3), (4, 5), (5, 7), (8, 11), (12, 15), (16, 19), (0, 0)]
    expected = [NEITHER, NEITHER, SHARED, SHARED, NEITHER, PRIVATE, PRIVATE, NEITHER]
    assert shared_tokens(IMAGE, TEXT, offsets).tolist() == expected
    first = [{"object": "bus", "start": 0, "end": 3}]
    assert shared_tokens(IMAGE, first, [(0, 0), (0, 3)]).tolist() == [NEITHER, SHARED]  # [CLS] has no characters

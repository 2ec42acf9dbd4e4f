"""The operations of the models in TensorFlow."""

from __future__ import annotations

import math

import tensorflow as tf
from _models import NORM_EPSILON

einsum = tf.einsum
relu = tf.nn.relu
embed = tf.gather


def gelu(x: tf.Tensor) -> tf.Tensor:
    return tf.nn.gelu(x, approximate=True)


def conv(images: tf.Tensor, filters: tf.Tensor, bias: tf.Tensor) -> tf.Tensor:
    return tf.nn.bias_add(tf.nn.conv2d(images, filters, 1, "VALID"), bias)


def pool(images: tf.Tensor) -> tf.Tensor:
    return tf.nn.max_pool2d(images, 2, 2, "VALID")


def flatten(images: tf.Tensor) -> tf.Tensor:
    return tf.reshape(images, [-1, math.prod(images.shape[1:])])


def dense(x: tf.Tensor, kernel: tf.Tensor, bias: tf.Tensor) -> tf.Tensor:
    return tf.tensordot(x, kernel, 1) + bias


def norm(x: tf.Tensor, scale: tf.Tensor, shift: tf.Tensor) -> tf.Tensor:
    mean, variance = tf.nn.moments(x, -1, keepdims=True)
    return tf.nn.batch_normalization(x, mean, variance, shift, scale, NORM_EPSILON)


def attend(query: tf.Tensor, key: tf.Tensor, value: tf.Tensor) -> tf.Tensor:
    scores = tf.einsum("bqhk,bphk->bhqp", query, key) / math.sqrt(query.shape[-1])
    seen = tf.linalg.band_part(tf.ones(scores.shape[-2:], tf.bool), -1, 0)
    weights = tf.nn.softmax(tf.where(seen, scores, scores.dtype.min))
    return tf.einsum("bhqp,bphk->bqhk", weights, value)


def cross_entropy(logits: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
    losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels=labels, logits=logits)
    return tf.reduce_mean(losses)

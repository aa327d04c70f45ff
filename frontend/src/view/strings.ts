/** Interface strings of the viewer only, in English and Chinese. */

export const viewStrings = {
  // Frame and texts
  loading: { en: "Loading …", zh: "正在加载……" },
  factModel: {
    en: "{kind}, {parameters} parameters, {dtype} on {device}",
    zh: "{kind}，{parameters} 个参数，{device} 上的 {dtype}",
  },
  factMost: { en: "texts of up to {context} tokens", zh: "文本最多 {context} 个词元" },
  context_trained: { en: "the model's maximum context", zh: "模型的最大上下文" },
  context_memory: { en: "limited by memory", zh: "受内存限制" },
  context_requested: { en: "as requested", zh: "按要求设定" },
  servedBy: {
    en: "polyhead {version}, local only. The texts you type stay on this machine.",
    zh: "polyhead {version}，只在本机运行。您输入的文本不会离开本机。",
  },
  theText: { en: "Text", zh: "文本" },
  textSlot: { en: "Text {slot}", zh: "文本 {slot}" },
  placeholder: { en: "Type a sentence, or paste a long text", zh: "输入一句话，或粘贴一篇长文" },
  run: { en: "Run", zh: "运行" },
  stop: { en: "Stop", zh: "停止" },
  runShortcut: { en: "Ctrl+Enter runs", zh: "Ctrl+Enter 运行" },
  secondText: { en: "Compare with a second text", zh: "与第二段文本比较" },
  closeSecond: { en: "Remove text B", zh: "移除文本 B" },
  runProgress: { en: "Running: layer {done} of {total}", zh: "运行中：第 {done} 层，共 {total} 层" },
  runStarts: { en: "Running …", zh: "运行中……" },
  runDone: {
    en: "{tokens} tokens in {seconds} s, {bytes} MB in memory",
    zh: "{seconds} 秒处理 {tokens} 个词元，占用 {bytes} MB",
  },
  truncated: { en: "The text has {total} tokens; only the first {read} are used.", zh: "文本有 {total} 个词元；只用了前 {read} 个。" },
  noText: {
    en: "No text yet. Type a text above and press Run to see the attention of every head.",
    zh: "尚无文本。请在上方输入文本并点“运行”，即可看到每个头的注意力。",
  },

  // Errors
  close: { en: "Close", zh: "关闭" },
  waitingForServer: {
    en: "The server is busy. Missing data is requested again every second; pending requests: {count}",
    zh: "服务器正忙。缺少的数据每秒会重新请求；等待中的请求：{count}",
  },
  "error_too-large": { en: "The text is too long.", zh: "文本过长。" },
  "error_out-of-memory": { en: "Out of memory. A shorter text needs less.", zh: "内存不足。较短的文本所需更少。" },
  error_invalid: { en: "The server rejected the request.", zh: "服务器拒绝了该请求。" },
  error_closing: { en: "The server is shutting down.", zh: "服务器正在关闭。" },
  error_failed: { en: "Internal server error.", zh: "服务器内部错误。" },
  offline: {
    en:
      "The server does not respond. The page keeps what it shows and continues when the server responds again. " +
      "If you have restarted “polyhead view”, open the new address that it printed.",
    zh: "服务器没有响应。页面会保留已显示的内容，并在恢复响应后继续。若已重新启动“polyhead view”，请打开它新打印的地址。",
  },

  // All heads
  encoder: { en: "Encoder", zh: "编码器" },
  decoder: { en: "Decoder", zh: "解码器" },
  crossAttention: { en: "Cross-attention", zh: "交叉注意力" },
  gridAbout: {
    en:
      "Each square is the attention map of one head: rows are query tokens, from the start of the text to its " +
      "end, columns are key tokens. Open one, or choose a word below to follow it through all heads.",
    zh: "每个方格是一个头的注意力图：行是查询词元，从文首到文末；列是键词元。可以打开一个头，或在下方选一个词，在所有头中跟踪它。",
  },
  gridLabel: {
    en: "{stack}, text {slot}. Arrow keys move, Enter selects a head.",
    zh: "{stack}，文本 {slot}。方向键移动，Enter 选中一个头。",
  },
  gridFile: { en: "{shown} ({model}, text {slot})", zh: "{shown}（{model}，文本 {slot}）" },
  gridWeights: { en: "A cell is one attention weight.", zh: "每格是一个注意力权重。" },
  gridBlocks: { en: "A cell is {block} × {block} tokens.", zh: "每格是 {block} × {block} 个词元。" },
  gridEstimate: {
    en: "Estimates: of every {every} query tokens the middle {rows} are sampled. Open a head for exact numbers.",
    zh: "估计值：每 {every} 个查询词元只抽取中间 {rows} 个。打开一个头可得到精确数值。",
  },
  drawing: { en: "Drawing: layer {done} of {total}", zh: "绘制中：第 {done} 层，共 {total} 层" },
  clickAction: { en: "A click", zh: "点击" },
  clickOpens: { en: "opens a head", zh: "打开头" },
  clickAblates: { en: "ablates or restores it", zh: "消融或恢复头" },
  ablated: { en: "ablated", zh: "已消融" },
  stackOf: { en: "Layers and heads", zh: "层与头" },

  // A word
  wordsAbout: {
    en:
      "Hover over a word, or move with the arrow keys. Shaded words are those it attends to in this head; a bar " +
      "under a word means that it attends to the chosen one. A click pins the choice.",
    zh: "指向一个词，或用方向键移动。着色的是它在此头中关注的词；词下的横条表示该词关注所选的词。点击可固定选择。",
  },
  wordsAboutAll: {
    en: "Hover over a word, or move with the arrow keys, to see it in every head. A click pins the choice.",
    zh: "指向一个词，或用方向键移动，即可在每个头中看到它。点击可固定选择。",
  },
  wordInHeads: { en: "“{word}” in every head", zh: "“{word}”在每个头中" },
  wordInHeadsAbout: {
    en: "Each square names the token with the max attention weight; the strip shows all weights along the text.",
    zh: "每个方格写出最大注意力权重的词元；色条显示全文各处的权重。",
  },
  whichWay: { en: "Direction", zh: "方向" },
  attendsTo: { en: "attends to", zh: "关注" },
  attendedBy: { en: "attended to by", zh: "被关注" },
  wordCell: { en: "{head}: {token} {share}", zh: "{head}：{token} {share}" },
  notInLayer: { en: "{head}: the word is not among the tokens of this layer", zh: "{head}：该词不属于此层的词元" },
  partsOfText: { en: "Part of the text", zh: "文本的部分" },
  partOfText: { en: "Tokens {first} to {last} of {total}", zh: "第 {first} 到 {last} 个词元，共 {total} 个" },
  previousPart: { en: "Previous", zh: "向前" },
  nextPart: { en: "Next", zh: "向后" },
  lines: { en: "Attention between words", zh: "词之间的注意力" },
  linesAbout: {
    en: "A line leads from a query, on the left, to a key, on the right; weights below 2% are not drawn.",
    zh: "线从左边的查询连到右边的键；低于 2% 的权重不绘制。",
  },
  linesOfPart: {
    en:
      "A line leads from a query, on the left, to a key, on the right; weights below 2%, and attention from and to " +
      "other parts of the text, are not drawn.",
    zh: "线从左边的查询连到右边的键；低于 2% 的权重，以及与文本其他部分之间的注意力，不绘制。",
  },
  textLine: { en: "Words of the text", zh: "文本的词" },
  targetLine: { en: "Generated words", zh: "生成的词" },

  // One head
  noSuchText: { en: "Text {slot} has not been run.", zh: "文本 {slot} 尚未运行。" },
  ablateHead: { en: "Ablate this head", zh: "消融此头" },
  restoreHead: { en: "Restore this head", zh: "恢复此头" },
  compareWith: { en: "Compare with", zh: "与之比较" },
  whichLayer: { en: "Layer", zh: "层" },
  distanceIs: {
    en: "Mean Jensen-Shannon distance of the rows: {distance} (0 identical, {most} disjoint).",
    zh: "各行的平均 Jensen-Shannon 距离：{distance}（0 为相同，{most} 为毫无重合）。",
  },
  distanceUnlike: { en: "No distance: the two have different numbers of tokens.", zh: "无距离：两者的词元数不同。" },
  distanceNone: { en: "No distance: {reason}", zh: "无距离：{reason}" },
  distanceComputing: { en: "Computing the Jensen-Shannon distance …", zh: "正在计算 Jensen-Shannon 距离……" },

  // The output
  output: { en: "Model output", zh: "模型的输出" },
  nextToken: { en: "Next token", zh: "下一个词元" },
  maskedToken: { en: "Token at position {position}", zh: "第 {position} 位的词元" },
  vectorOutput: {
    en:
      "An encoder returns an embedding of {size} dimensions; ablate heads, or run a second text, to see how it " +
      "changes.",
    zh: "编码器返回 {size} 维的嵌入向量；消融某些头或运行第二段文本，可看到它如何变化。",
  },
  entropyIs: { en: "Entropy {nats}", zh: "熵 {nats}" },
  candidate: { en: "Append “{token}”, probability {share}", zh: "追加“{token}”，概率 {share}" },
  appendMostLikely: { en: "Append the most likely token", zh: "追加最可能的词元" },
  undo: { en: "Undo", zh: "撤销" },
  appendOneOf: { en: "Append one of these:", zh: "追加其中之一：" },
  newestToken: { en: "Attention of the newest token, “{token}”", zh: "最新的词元“{token}”的注意力" },
  generatedCount: { en: "Generated tokens: {count}", zh: "已生成词元：{count}" },
  ablatedHeads: { en: "Ablated heads", zh: "已消融的头" },
  noneAblated: {
    en: "None. Ablate one in its panel, or in the grid, to see what changes.",
    zh: "无。可在头的面板或网格中消融一个头，看有何变化。",
  },
  restoreNamed: { en: "Restore {head}", zh: "恢复 {head}" },
  restoreAll: { en: "Restore all", zh: "全部恢复" },
  runWithout: { en: "Run again without them", zh: "不用它们重新运行" },
  runWithoutAbout: {
    en: "The maps are of the intact model; run again to see later layers with these heads ablated.",
    zh: "图中是完整的模型；重新运行可看到消融这些头时后面各层的情形。",
  },
  ranWithout: { en: "Text {slot} was run with {heads} ablated.", zh: "文本 {slot} 运行时消融了 {heads}。" },
  effectOf: { en: "Effect on text {slot}", zh: "对文本 {slot} 的影响" },
  effectComputing: { en: "Computing the effect …", zh: "正在计算影响……" },
  divergenceIs: { en: "Kullback-Leibler divergence: {nats}", zh: "KL 散度：{nats}" },
  cosineIs: { en: "Cosine similarity of the two embeddings: {cosine}", zh: "两个向量的余弦相似度：{cosine}" },
  notFinite: { en: "not finite", zh: "非有限值" },
  token: { en: "Token", zh: "词元" },
  before: { en: "Before", zh: "之前" },
  after: { en: "After", zh: "之后" },
  betweenTexts: { en: "Text A and text B", zh: "文本 A 与文本 B" },

  // The map
  map: { en: "Attention matrix", zh: "注意力矩阵" },
  mapOf: { en: "{head}, text {slot}", zh: "{head}，文本 {slot}" },
  mapHelp: {
    en:
      "Wheel or pinch zooms, drag pans, a click chooses the query token. Keys: + and − zoom, arrows pan, Enter " +
      "chooses, 0 shows the whole matrix.",
    zh: "滚轮或双指缩放，拖动平移，点击选中查询词元。按键：+ 和 − 缩放，方向键平移，Enter 选中，0 显示整个矩阵。",
  },
  mapLabel: {
    en:
      "Attention map of {head}. Plus and minus zoom, arrow keys pan, 0 shows the whole matrix; the weight at " +
      "the crosshair is shown below.",
    zh: "{head} 的注意力图。加减号缩放，方向键平移，0 显示整个矩阵；十字处的权重见下方。",
  },
  zoomIn: { en: "Zoom in", zh: "放大" },
  zoomOut: { en: "Zoom out", zh: "缩小" },
  zoomWhole: { en: "Whole", zh: "全部" },
  pool: { en: "Cells of several tokens show", zh: "多词元的格显示" },
  pool_sum: { en: "share of attention", zh: "注意力比例" },
  pool_max: { en: "max attention weight", zh: "最大注意力权重" },
  mapEstimate: { en: "Estimate. Exact: {done} of {total}", zh: "估计值。精确计算：{done}/{total}" },
  mapComputing: { en: "Computing exact values: {done} of {total}", zh: "正在计算精确值：{done}/{total}" },
  mapExact: { en: "Exact", zh: "精确" },
  mapWaiting: { en: "Computing …", zh: "计算中……" },
  mapTiles: { en: "Exact; {count} finer tiles loading", zh: "精确；正在加载 {count} 个更细的图块" },
  cellOne: { en: "{query} ({i}) attends to {key} ({j}): {weight}", zh: "{query}（{i}）关注 {key}（{j}）：{weight}" },
  cellSum: {
    en: "Tokens {rows} attend to tokens {columns}: {share} of their attention",
    zh: "词元 {rows} 关注词元 {columns}：占其注意力的 {share}",
  },
  cellMax: {
    en: "Tokens {rows} attend to tokens {columns}: at most {share}",
    zh: "词元 {rows} 关注词元 {columns}：最多 {share}",
  },
} as const;
